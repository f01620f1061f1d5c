"""A finished run's model as a file that runs elsewhere: written, opened again in its own runtime, compared with the
model that the run judged, measured anew, and told of in a card."""

import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ...export import (
    FORMATS,
    Answer,
    Parity,
    Plain,
    accuracy_on,
    functional,
    latency_ms,
    measured,
    parity,
    plain,
    preparing,
    write_card,
)
from ...export.checking import COMPARED, TIMED
from ..assembly.assemble import Experiment
from ..recipes.problems import Problem, RecipeError, nearest
from ..recipes.tables import Tables
from ..running.run import one_thread
from .describing import about, finite, taken
from .reloading import rebuilt
from .trained import Trained, finished, trained, wrong
from .wanted import Input, Wanted


class NotTheSame(Exception):  # noqa: N818 - named for what is wrong
    """An exported file that does not make what the run's model makes."""

    def __init__(self, found: Parity, folder: Path):
        super().__init__(
            f"the exported file differs from the run's model by {found.difference:.1e}, more than {found.bound:.1e}"
        )
        self.hint = f"it was removed from {folder}; try another format"


@dataclass(frozen=True)
class Exported:
    folder: Path
    card: Mapping[str, Any]

    @property
    def file(self) -> Path:
        return self.folder / str(self.card["file"])


def export(run: Path, wanted: Wanted, to: str, out: Path | None, given: Input, tables: Tables, data: Path) -> Exported:
    if to not in FORMATS:
        raise RecipeError([Problem((), "FORMAT_NAME", f"there is no format {to!r}", nearest(to, FORMATS))], "--to")
    FORMATS[to].require(to)
    experiment = finished(run, tables, data)
    with one_thread():
        chosen = trained(run, experiment, wanted, tables, data)
        folder = run / "exports" / f"{chosen.name}-{to}" if out is None else out
        if folder.exists():
            raise wrong(folder, "OUT_EXISTS", f"{folder} is there already", "say another --out")
        folder.mkdir(parents=True)
        try:
            return _exported(run, experiment, chosen, to, folder, given, tables)
        except BaseException:
            shutil.rmtree(folder)
            raise


def model_of(run: Path, wanted: Wanted, tables: Tables, data: Path, given: Input = "stored") -> Plain:
    """The same without a file."""
    experiment = finished(run, tables, data)
    return _module(experiment, trained(run, experiment, wanted, tables, data), given)


def _exported(
    run: Path, experiment: Experiment, chosen: Trained, to: str, folder: Path, given: Input, tables: Tables
) -> Exported:
    kind, dataset, shown = FORMATS[to], experiment.dataset, taken(experiment, given)
    file, example = folder / f"model{kind.suffix}", shown(dataset.test.x[:1])
    kind.write(_module(experiment, chosen, given), example.repeat(2, *[1] * (example.dim() - 1)), file)
    card = about(run, experiment, chosen, to, file, given)
    answer = kind.open(file, lambda: rebuilt(card, tables))
    few = dataset.test.x[:COMPARED]
    right, inputs = functional(chosen.model, chosen.weights), dataset.preparation(few)
    same = parity(answer, shown(few), right, inputs, kind.one_at_a_time)
    if not same.holds:
        raise NotTheSame(same, folder)
    card |= {
        "parity": {**asdict(same), "bound": same.bound},
        "measured": _measured(experiment, chosen, answer, shown, kind.one_at_a_time),
        "latency": {
            "median_ms": latency_ms(answer, example), "runs": TIMED, "batch": 1, "threads": 1,
            "runtime": kind.runtime_version, "machine": platform.machine(),
        },
    }  # fmt: skip
    shutil.copyfile(run / "recipe.toml", folder / "recipe.toml")
    if dataset.vocabulary:
        (folder / "vocabulary.txt").write_text("\n".join(dataset.vocabulary) + "\n", encoding="utf-8")
    write_card(folder, card)
    return Exported(folder, card)


def _module(experiment: Experiment, chosen: Trained, given: Input) -> Plain:
    dataset = experiment.dataset
    prepare = preparing(dataset.preparation, dataset.test.x[:1]) if given == "stored" else None
    return plain(chosen.model, chosen.weights, prepare)


def _measured(
    experiment: Experiment, chosen: Trained, answer: Answer, shown: Callable[[Tensor], Tensor], alone: bool
) -> dict[str, dict[str, float | None]]:
    """In batches as large as the judge's, for who looks at the whole batch; and of such, also one by one."""
    dataset, size = experiment.dataset, 1 if alone else experiment.judge.batch_size
    found = {"global": measured(answer, dataset, shown, size)}
    if chosen.model.mixes_examples() and not alone:
        found["global, one example at a time,"] = measured(answer, dataset, shown, 1)
    if chosen.own_tests is not None and len(chosen.own_tests):
        x, y = dataset.test.x[chosen.own_tests], dataset.test.y[chosen.own_tests]
        size = 1 if alone else experiment.judge.device_batch(chosen.model)
        found["local"] = {"accuracy": accuracy_on(answer, shown(x), y, size)}
    return {test: {name: finite(value) for name, value in metrics.items()} for test, metrics in found.items()}
