"""A run written down as it goes: rows, events and checkpoints in its folder, and at the end its models.

Who takes part in a run, what it costs them and what they hold: written once, for reports and whoever has no data.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..data import DATASETS
from ..engines import Refusal
from ..evaluation import Row
from ..evaluation.metrics import unigram_perplexity
from ..fleet.tiers import tier_regions
from ..methods import METHODS
from ..models import MODELS, compute_cost
from ..recipe.toml import dumps
from ..tensors import Parcel, fingerprint
from . import final_models
from .checkpoint import FOLDER, Checkpoint, CheckpointPolicy, Checkpoints
from .experiment import Experiment
from .final_models import save_models
from .folder import RunWriter, peak_memory
from .loop import RoundResult, single_thread, rounds
from .trackers import NONE, Trackers

FILE = "fleet.json"
MOST_CLASSES = 100  # columns; of more, words say, only the most frequent are told apart
FREQUENT = 10


def fleet_summary(experiment: Experiment) -> dict[str, Any]:
    recipe, fleet, method = experiment.loaded.recipe, experiment.fleet, experiment.method
    fixed = fleet.assignment == "fixed"
    return {
        "method": {
            "name": recipe.method.name, "paper": method.info.paper, "uploads": method.info.uploads,
            "client_state": method.info.client_state, "shares_features": method.shares_features,
            "produces": method.info.produces,
        },
        "dataset": experiment.dataset.name,
        "tiers": _tiers(experiment),
        "regions": [list(region) for region in tier_regions(fleet)],
        "devices": [fleet.name(index) for index in range(fleet.size)],
        "device_tiers": [one.tier for one in fleet.devices(1)] if fixed else None,
        "unseen": [fleet.name(index) for index in sorted(fleet.holdout_devices)],
        "holdings": _holdings(experiment),
        "own_names": _own_names(experiment),
    }  # fmt: skip


def _tiers(experiment: Experiment) -> list[dict[str, Any]]:
    fleet = experiment.fleet
    served = {tier.name for tier in fleet.active_tiers}
    found = []
    for tier, share in zip(fleet.tiers, fleet.shares, strict=True):
        spent = compute_cost(tier.model)
        trained = tier.name in served
        size = {"parameters": spent.parameters, "macs": spent.macs}
        found.append({"name": tier.name, "share": share, **size, "trained": trained})
    return found


def _holdings(experiment: Experiment) -> dict[str, Any]:
    """How many training examples of each class every device holds; where every word is one, how many words."""
    labels, classes = experiment.dataset.train.y.numpy(), experiment.dataset.classes
    shown: Sequence[int] = range(classes)
    if classes > MOST_CLASSES:
        often = np.bincount(labels.ravel(), minlength=classes)
        shown = np.argsort(-often, kind="stable")[:FREQUENT].tolist()
    counts = [np.bincount(labels[rows].ravel(), minlength=classes) for rows in experiment.partition.train]
    told = [[int(count[one]) for one in shown] for count in counts]
    rest = [int(count.sum()) - sum(some) for count, some in zip(counts, told, strict=True)]
    if not any(rest):
        return {"classes": [str(one) for one in shown], "counts": told}
    return {
        "classes": [*(str(one) for one in shown), "others"],
        "counts": [[*some, other] for some, other in zip(told, rest, strict=True)],
    }


def _own_names(experiment: Experiment) -> list[str]:
    """What a recipe names that is not the project's own: to run it again takes the user's file too."""
    recipe = experiment.loaded.recipe
    families = {tier.family or recipe.model.family for tier in recipe.tiers}
    unknown = [recipe.method.name] if recipe.method.name not in METHODS else []
    unknown += sorted(families - MODELS.keys())
    return unknown + ([recipe.data.dataset] if recipe.data.dataset not in DATASETS else [])


class NothingAdmitted(Exception):  # noqa: N818 - named for what is wrong
    """A run in which no reply of any device could be used: nothing was learned, and it must not look as if."""

    def __init__(self, first: Refusal, folder: Path):
        super().__init__(f"no reply was ever admitted; device {first.device}: {first.code}: {first.reason}")
        self.hint = f"every refusal is in {folder / 'events.jsonl'}"


def record_rounds(
    experiment: Experiment, folder: Path, since: Checkpoint | None = None, followers: Trackers = NONE
) -> Iterator[RoundResult]:
    """The rounds of an experiment, each written into the run's folder before it is handed on. With `since`, the folder
    is there and the run goes on from then; after round 0, it begins anew."""
    recipe = experiment.loaded.recipe.document()
    journal = RunWriter(folder)
    keeper = CheckpointPolicy(Checkpoints(folder / FOLDER), saved_every(experiment), journal.sync)
    record = Recorder(experiment, journal, keeper)
    with single_thread(), closing(experiment.engine):
        record.open(since)
        with record.journal.watched(), followers.told(folder, recipe, since is not None), record.kept():
            for done in rounds(experiment, since):
                record.add(done)
                followers.rows(done.rows)
                yield done
            record.close()


def saved_every(experiment: Experiment) -> int | Literal["auto"]:
    """Devices that keep their memories themselves forget what is older than the last round that counts."""
    return experiment.loaded.recipe.checkpoints.every if experiment.client_states.is_local else 1


@dataclass
class Recorder:
    experiment: Experiment
    journal: RunWriter
    keeper: CheckpointPolicy
    began: float = field(default_factory=time.perf_counter)
    server: Parcel = field(default_factory=dict)
    last: int = 0  # round that is over
    replied: int = 0
    seen: int = 0  # refusals
    commits: int = 0  # of devices' memories
    saving: float = 0.0  # seconds, told so far

    def open(self, since: Checkpoint | None) -> None:
        if since is None:
            self.journal.open(dumps(self.experiment.loaded.recipe.document()), manifest(self.experiment))
        self.experiment.partition.save(self.journal.folder / "partition.json")
        self.journal.document(FILE, fleet_summary(self.experiment))
        if since is None:
            return
        self.keeper.checkpoints.delete_after(since.number)
        self.journal.reopen(since.about.get("sizes", {}))
        restore_experiment(self.experiment, since)
        self.server, self.last, self.replied = since.server, since.number, since.about.get("replied", 0)
        self.began -= since.about.get("seconds", 0.0)

    def add(self, done: RoundResult) -> None:
        self.journal.rows(done.rows)
        new, self.seen = self.experiment.refusals[self.seen :], len(self.experiment.refusals)
        in_order = sorted(new, key=lambda one: (one[0], one[1].device, one[1].code))  # not in that of arrival
        self.journal.events({"round": number, **asdict(refusal)} for number, refusal in in_order)
        self.journal.participation(done.participation)
        self.journal.timings([self._timing(done)])
        self.replied += done.traffic.replied
        self.server, self.last = done.server, done.number
        self.keeper.after(self._point(done.number), score(done.rows))
        self.commits = self.experiment.client_states.commits  # last: an interruption must not find it half done

    def _point(self, number: int) -> Checkpoint:
        states = self.experiment.client_states
        about = {
            "replied": self.replied, "seconds": self._seconds(), "sizes": self.journal.sizes(),
            "state": self.experiment.state.as_json(), **self._made_of,
        }  # fmt: skip
        return Checkpoint(number, self.server, states.committed, about, states.versions)

    def _timing(self, done: RoundResult) -> dict[str, Any]:
        """What depends on the machine, and so is no row; saving is what was spent on it since the round before."""
        saving, self.saving = self.keeper.spent - self.saving, self.keeper.spent
        took = {"seconds": done.seconds, "evaluation_seconds": done.evaluation_seconds, "saving_seconds": saving}
        rounded = {name: round(one, 4) for name, one in took.items()}
        return {"round": done.number, **rounded, "peak_memory": peak_memory()}

    @cached_property
    def _made_of(self) -> dict[str, Any]:
        """What a run cannot go on with if it has become another."""
        return collect_inputs(self.experiment)

    def _seconds(self) -> float:
        return round(time.perf_counter() - self.began, 3)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Whoever interrupts a run loses only the round that was going on."""
        try:
            yield
        except BaseException:
            if self.experiment.client_states.commits == self.commits:  # else memories are ahead of the server
                self.keeper.save()
            raise

    def close(self) -> None:
        experiment = self.experiment
        if not self.replied and experiment.refusals:
            raise NothingAdmitted(experiment.refusals[0][1], self.journal.folder)
        self.keeper.save()
        save_models(experiment, self.server, self.last, self.journal)
        alike = final_models.compute_tier_cka(experiment, self.server, self.last, self.journal.folder)
        self.journal.document(final_models.FILE, alike)
        spent = {"seconds": self._seconds(), "checkpoint_seconds": round(self.keeper.spent, 3)}
        self.journal.update(status="finished", **spent, **fingerprints(experiment, self.server))


def restore_experiment(experiment: Experiment, since: Checkpoint) -> None:
    """Everything but the server's state, as it was after a round."""
    experiment.client_states.committed = since.client_states
    experiment.state.restore(since.about.get("state", {}))


def fingerprints(experiment: Experiment, server: Parcel) -> dict[str, str]:
    """One of the server's state, one of all that devices remember; of when they did, where they keep it themselves."""
    held = experiment.client_states.committed
    kept = {f"{who} {name}": tensors for who in sorted(held) for name, tensors in held[who].items()}
    return {"sha256": fingerprint(server), "devices_sha256": fingerprint(kept)}


def score(rows: tuple[Row, ...]) -> float | None:
    """How good a round's models are, for keeping the best: their mean accuracy, tier by tier."""
    marks = [row.value for row in rows if row.metric == "accuracy" and not row.device]
    return sum(marks) / len(marks) if marks else None


def collect_inputs(experiment: Experiment) -> dict[str, Any]:
    """All that decides a run's result, in JSON's words."""
    document = json.loads(json.dumps(experiment.loaded.recipe.document()))
    return {
        "recipe": document,
        "data": experiment.dataset.fingerprint(),
        "partition": experiment.partition.fingerprint(),
    }


def manifest(experiment: Experiment) -> Mapping[str, Any]:
    return {
        "seed": experiment.loaded.recipe.seed,
        "started": now(),
        "data": experiment.dataset.fingerprint(),
        "partition": experiment.partition.fingerprint(),
        "test_examples": len(experiment.dataset.test),
        **unigram(experiment),
    }


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def unigram(experiment: Experiment) -> Mapping[str, float]:
    """For text with hidden words, how well they are guessed by one who knows only how often each word occurs."""
    dataset, hidden = experiment.dataset, experiment.evaluator.sequence.masked()
    if hidden is None or dataset.test.y.dim() < 2 or not bool(hidden.any()):
        return {}
    asked = dataset.test.y[hidden]
    return {"unigram_perplexity_hidden": unigram_perplexity(dataset.train.y, asked, dataset.classes)}
