"""A finished run's global model, opened again, and the sub-nets that can be cut out of it.

FedSup promises a net for whatever device without training again (Kim & Yun, 2022, section 3). What is drawn depends on
the seed alone.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...footprints import part_of
from ...methods.supernet import Choice, chosen
from ...models import SPACES, Model, Space, cost
from ...reporting import read_manifest
from ...seeds import SUBNET_SEARCH, SUBNET_SEARCH_IN_BUDGET, generator
from ...tensors import Tensors
from ..assembly.assemble import Experiment, assemble
from ..recipes.load import Loaded, load
from ..recipes.problems import Problem, RecipeError, nearest
from ..recipes.tables import Tables
from .latency import latency_ms

ENOUGH = 0.1  # such a share of the nets asked for must fit a budget, or more are drawn
PATIENCE = 4  # draws for each net that is still wanted


Kind = Literal["macs", "parameters", "latency_ms"]


@dataclass(frozen=True)
class Budget:
    kind: Kind
    most: float

    def spends(self, net: Model) -> float:
        return latency_ms(net) if self.kind == "latency_ms" else float(getattr(cost(net), self.kind))

    def fits(self, net: Model) -> bool:
        return self.spends(net) <= self.most


@dataclass(frozen=True)
class Supernet:
    """A finished run's global model and the sizes it may be cut to."""

    folder: Path
    experiment: Experiment
    weights: Tensors
    whole: Model
    tiers: tuple[Model, ...]
    space: Space

    def part(self, net: Model) -> Model:
        """The same net, if it lies in the global model."""
        try:
            part_of(net, self.whole)
        except Exception as error:  # whatever a family says of sizes it cannot be built in
            said = f"a sub-net of this space cannot be cut out of the largest tier's model: {error}"
            raise RecipeError([Problem((), "SPACE_SHAPE", said, "say another --space")], str(self.folder)) from error
        return net

    def sample(self, count: int, seed: int) -> list[Model]:
        """The smallest, the largest, the tiers' own and random others, none twice. More begin with the same."""
        space, whole, draw = self.space, self.whole, generator(seed, SUBNET_SEARCH)
        found = dict.fromkeys([space.smallest(whole), space.largest(whole), *self.tiers])
        if space.count() <= count:
            found |= dict.fromkeys(self._of(picks) for picks in product(*self._places))
        while len(found) < count < space.count():
            found[space.draw(whole, draw)] = None
        return [self.part(net) for net in found]

    def sample_within(self, budget: Budget, count: int, seed: int) -> list[Model]:
        """A sample in which enough nets fit a budget, as far as there are so many."""
        nets = dict.fromkeys(self.sample(count, seed))
        lacking = round(ENOUGH * count) - sum(map(budget.fits, nets))
        if self.space.count() <= count or not budget.fits(self.space.smallest(self.whole)):
            return list(nets)
        draw, most = generator(seed, SUBNET_SEARCH_IN_BUDGET), len(nets) + max(0, lacking)
        for _ in range(PATIENCE * lacking):
            if len(nets) < most:
                nets[self._drawn_within(budget, draw)] = None
        return list(nets)

    def _drawn_within(self, budget: Budget, draw: np.random.Generator) -> Model:
        """A random net of which, in random order, as few choices are made small as it takes to fit.

        Drawing until one fits, as a device does, takes thousands of draws where a budget is small.
        """
        places = self._places
        picks = [values[int(draw.integers(len(values)))] for values in places]
        order = [int(place) for place in draw.permutation(len(places))]

        def shrunk(number: int) -> Model:
            small = set(order[:number])
            pairs = enumerate(zip(places, picks, strict=True))
            return self.part(self._of([values[0] if at in small else pick for at, (values, pick) in pairs]))

        return shrunk(bisect_left(range(len(places)), True, key=lambda number: budget.fits(shrunk(number))))

    @cached_property
    def _places(self) -> list[tuple[Any, ...]]:
        """All choices one after the other, those of a list place by place."""
        return [values for _, choices in self.space.choices for values in (choices if _listed(choices) else (choices,))]

    def _of(self, picks: Sequence[Any]) -> Model:
        """The net of one pick for each place."""
        left = iter(picks)
        sizes = {
            name: tuple(islice(left, len(choices))) if _listed(choices) else next(left)
            for name, choices in self.space.choices
        }
        return self.whole.resized(**sizes)


def _listed(choices: tuple[Any, ...]) -> bool:
    return isinstance(choices[0], tuple)


def open_supernet(folder: Path, tables: Tables, data: Path, space: str | None = None) -> Supernet:
    """Of a run's folder. The space is the one said, else the method's own, else what the tiers differ in."""
    experiment = assemble(finished_recipe(folder, tables), tables, data)
    if experiment.dataset.fingerprint() != read_manifest(folder).get("data"):
        said = "the data is not what the run was made with, so what was measured would mean nothing"
        raise RecipeError([Problem((), "RUN_DATA", said, "say its --data-dir")], str(folder))
    assert experiment.warm is not None  # the recipe starts from the run's own model
    choice: Choice = getattr(experiment.method, "space", "tiers") if space is None else space
    if isinstance(choice, str) and choice not in (known := ("tiers", *SPACES)):
        problem = Problem((), "SPACE_NAME", f"there is no space {choice!r}", nearest(choice, known))
        raise RecipeError([problem], "--space")
    # every setting said, so that equal nets are equal however they were come by
    sizes = tuple(tier.model.resized(**tier.model.spelled_out()) for tier in experiment.fleet.served)
    whole = sizes[experiment.fleet.served.index(experiment.fleet.largest)]
    return Supernet(folder, experiment, experiment.warm, whole, sizes, chosen(choice, sizes))


def finished_recipe(folder: Path, tables: Tables) -> Loaded:
    """The recipe of a finished run, with the run's own global model to start from."""

    def wrong(said: str, hint: str = "") -> RecipeError:
        return RecipeError([Problem((), "RUN_FOLDER", said, hint)], str(folder))

    if not (folder / "manifest.json").is_file():
        raise wrong("this is not the folder of a run", "fedloom run my.toml --out my-run makes one")
    status = read_manifest(folder).get("status")
    if status != "finished":
        raise wrong(f"a sub-net is cut out of a finished run; this one is {status}")
    if not (folder / "models").is_dir():
        raise wrong("the run's method keeps no model on the server, so there is nothing to cut a sub-net out of")
    loaded = load(folder / "recipe.toml", tables)
    return loaded.changed({**loaded.recipe.document(), "start": {"from": str(folder)}})
