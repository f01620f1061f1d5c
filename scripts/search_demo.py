"""Search the settings of recipes/demo.toml on validation examples: learning rate, schedule, rounds and head.

Every setting is run for all arms of the demonstration, the method and its controls, and its score is the mean of the
arms' accuracies on 400 training images that no device has: the choice favors no arm, and the test set is not used. All
settings are tried with one seed, the best four with three and the best two of these with five. Run, from the root:

    PYTHONPATH=src python scripts/search_demo.py RESULTS.jsonl            # results that the file has are not run again
    PYTHONPATH=src python scripts/search_demo.py RESULTS.jsonl --test     # the recipe as it is, on the test set
"""

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import fedloom as fl

RECIPE = Path(__file__).parents[1] / "recipes" / "demo.toml"
CONTROLS = ("small-for-all", "drop-the-small")
SHARES = {"large": 0.3, "medium": 0.3, "small": 0.4}
SEEDS = 5
STAGES = ((None, 1), (4, 3), (2, SEEDS))  # the best so many settings, with so many seeds

Setting = tuple[str, ...]
Accuracies = Mapping[str, float]


def settings() -> Iterator[Setting]:
    """Learning rate, schedule and rounds with one head, then other heads; always 30 local epochs in all."""
    rates, schedules, rounds = (0.02, 0.05, 0.1, 0.2, 0.4), ("constant", "cosine"), ((10, 3), (15, 2))
    for lr, schedule, (count, epochs) in product(rates, schedules, rounds):
        yield setting(lr, schedule, count, epochs, 3)
    yield setting(0.8, "cosine", 10, 3, 3)
    for lr, cells in product((0.1, 0.2), (None, 2, 4)):
        yield setting(lr, "cosine", 10, 3, cells)


def setting(lr: float, schedule: str, rounds: int, epochs: int, cells: int | None) -> Setting:
    """Changes of the recipe."""
    family = "model={family='convnet', hidden=[16, 32, 64], normalization='static_batch'"
    cosine = f"training.lr_schedule={{kind='cosine', rounds={rounds}}}"
    return (
        f"training.optimizer.lr={lr}",
        cosine if schedule == "cosine" else "training.lr_schedule={kind='constant'}",
        f"rounds={rounds}",
        f"training.epochs={epochs}",
        family + ("}" if cells is None else f", head={{cells={cells}}}}}"),
    )


def run(changes: Iterable[str], seed: int) -> dict[str, float]:
    """The accuracy of every arm and tier after the last round."""
    with tempfile.TemporaryDirectory() as folder:
        made = fl.compare(
            RECIPE, controls=CONTROLS, sets=[*changes, "evaluation.every=100"], seed=seed, out=Path(folder) / "compared"
        )
        records = {record["arm"]: record for record in made.result.records}
    method = next(name for name in records if name not in CONTROLS)
    return {
        **{tier: accuracy(records[method], tier) for tier in SHARES},
        "small-for-all": accuracy(records["small-for-all"], "small"),
        "drop-the-small": accuracy(records["drop-the-small"], "large"),
    }


def accuracy(record: Mapping[str, Any], tier: str) -> float:
    return float(record["accuracy"][tier]["mean"])


def score(accuracies: Accuracies) -> float:
    """The mean over arms; the method's arm counts every tier by its share of the devices."""
    method = sum(share * accuracies[tier] for tier, share in SHARES.items())
    return fmean([method, *(accuracies[name] for name in CONTROLS)])


class Results:
    """What has been measured, in a file."""

    def __init__(self, file: Path):
        self.file = file
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
        self.known = {(tuple(line["changes"]), line["seed"]): line["accuracies"] for line in lines}

    def measure(self, changes: Setting, seed: int, *also: str) -> None:
        if (changes, seed) not in self.known:
            self.known[changes, seed] = run((*changes, *also), seed)
            line = {"changes": changes, "seed": seed, "accuracies": self.known[changes, seed]}
            with self.file.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def mean(self, changes: Setting) -> dict[str, float]:
        found = [accuracies for (known, _), accuracies in self.known.items() if known == changes]
        return {"score": fmean(map(score, found)), **{name: fmean(one[name] for one in found) for name in found[0]}}


def search(results: Results) -> list[Setting]:
    """The settings from the best to the worst; those of a later stage come first."""
    ranked, rest = list(settings()), list[Setting]()
    for count, seeds in STAGES:
        ranked, rest = ranked[:count], [*ranked[count:], *rest] if count else rest
        for seed, changes in product(range(seeds), ranked):
            results.measure(changes, seed, "data.validation=400")
        ranked.sort(key=lambda changes: -results.mean(changes)["score"])
    return [*ranked, *rest]


def main(file: Path, only_test: bool) -> None:
    """Measure what is missing, and show the means."""
    results = Results(file)
    if only_test:
        for seed in range(SEEDS):
            results.measure((), seed)
    for changes in [()] if only_test else search(results):
        means = "  ".join(f"{name} {value:.1f}" for name, value in results.mean(changes).items())
        sys.stdout.write(f"{means}  {' '.join(changes)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--test" in sys.argv)
