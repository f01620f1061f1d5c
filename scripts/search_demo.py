"""Search the settings of recipes/demo.toml: learning rate, rounds, epochs and batch size.

Every setting is run for all arms of the demonstration, the method and its controls, and its score is the mean of the
arms' accuracies: the choice favors no arm. Devices have as many images as in the demonstration, and accuracies are of
5,000 training images of Fashion-MNIST that no device has; the demonstration's test images are not used. All settings
are tried with three seeds, the best two with five, which are not those of `fedloom run`. FEDLOOM_DATA names the folder
of the data. Run, from the root:

    PYTHONPATH=src python scripts/search_demo.py RESULTS.jsonl    # results that the file has are not run again
"""

import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import fedloom as fl

RECIPE = Path(__file__).parents[1] / "recipes" / "demo.toml"
CONTROLS = ("small-for-all", "drop-the-small")
SHARES = {"large": 0.3, "medium": 0.3, "small": 0.4}
DATA = (
    "data.dataset=fashion-mnist", "data.max_examples=100", "data.validation=5000", "evaluation.every=100",
    "evaluation.per_device=never",
)  # fmt: skip
FIRST_SEED = 100
STAGES = ((None, 3), (2, 5))  # the best so many settings, with so many seeds

Setting = tuple[str, ...]
Accuracies = Mapping[str, float]


def settings() -> list[Setting]:
    """As many steps as fit into a minute for five seeds."""
    rates, lengths = (0.05, 0.1, 0.2, 0.4), ((7, 3, 20), (10, 2, 20), (20, 1, 20))
    return [setting(lr, *length) for lr, length in product(rates, lengths)]


def setting(lr: float, rounds: int, epochs: int, batch_size: int) -> Setting:
    """Changes of the recipe."""
    return (
        f"training.optimizer.lr={lr}",
        f"training.lr_schedule.rounds={rounds}",
        f"rounds={rounds}",
        f"training.epochs={epochs}",
        f"training.batch_size={batch_size}",
    )


def run(changes: Iterable[str], seed: int) -> dict[str, float]:
    """The accuracy of every arm and tier after the last round."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "compared"
        made = fl.compare(RECIPE, controls=CONTROLS, sets=[*changes, *DATA], seed=seed, out=out, workers=2)
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

    def measure(self, changes: Setting, seed: int) -> None:
        if (changes, seed) not in self.known:
            self.known[changes, seed] = run(changes, seed)
            line = {"changes": changes, "seed": seed, "accuracies": self.known[changes, seed]}
            with self.file.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def mean(self, changes: Setting) -> dict[str, float]:
        found = [accuracies for (known, _), accuracies in self.known.items() if known == changes]
        return {"score": fmean(map(score, found)), **{name: fmean(one[name] for one in found) for name in found[0]}}


def search(results: Results) -> list[Setting]:
    """The settings from the best to the worst; those of a later stage come first."""
    ranked, rest = settings(), list[Setting]()
    for count, seeds in STAGES:
        ranked, rest = ranked[:count], [*ranked[count:], *rest] if count else rest
        for seed, changes in product(range(FIRST_SEED, FIRST_SEED + seeds), ranked):
            results.measure(changes, seed)
        ranked.sort(key=lambda changes: -results.mean(changes)["score"])
    return [*ranked, *rest]


if __name__ == "__main__":
    results = Results(Path(sys.argv[1]))
    for changes in search(results):
        means = "  ".join(f"{name} {value:.1f}" for name, value in results.mean(changes).items())
        sys.stdout.write(f"{means}  {' '.join(changes)}\n")
