"""How a block of devices runs through one module: the fastest way that gives what each device gets alone.

Which way a model runs: found out by trial when it first does, and kept; enough of a kind tell for the rest.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from .interface import Outputs, as_outputs
from .layers import StaticBatchNorm, fold, give_rules, unfold
from .structure import folds, last_layer, layers, switches

if TYPE_CHECKING:
    from .model import Family, Model, Shapes


Made = tuple[Outputs, dict[str, Tensor]]
Block = Callable[[Mapping[str, Tensor], Tensor], Made]
"""(weights [K, ...], x [K, batch, ...]) -> what the module makes and what it tracked, devices in front."""

BatchingMode = Callable[["FunctionalModule"], Block]

STATISTICS = ("running_mean", "running_var")


class SlowBlock(UserWarning):
    """A module that cannot run many devices at once the fast way; the results are the same."""


class FunctionalModule:
    """A module that is handed its weights at every call: torch.func.functional_call, without its 0.5 ms.

    Not safe for threads. Buffers other than normalization statistics are constants of the module. What the last layer
    gets is a tap, "features", also where the module shows none.
    """

    def __init__(self, module: nn.Module, training: bool, tracking: bool = False):
        give_rules(module)
        self.module = module.train(training)
        self.tracking = tracking
        self._norms = [part for part in module.modules() if isinstance(part, StaticBatchNorm)]
        for norm in self._norms:
            norm.tracking = tracking
        self._slots = _slots(module)
        self._statistics = statistic_slots(module)
        self._seen: Any = None
        last = last_layer(module)
        if last is not None:
            module.get_submodule(last).register_forward_pre_hook(self._look)

    def __call__(self, weights: Mapping[str, Tensor], x: Tensor) -> Made:
        for name, places in self._slots.items():
            for holder, key in places:
                holder[key] = weights[name]
        if self.tracking:
            for norm in self._norms:
                norm.applied = 0
        elif not self.module.training:
            for name, (holder, key) in self._statistics.items():
                holder[key] = weights[name]
        self._seen = None
        made = self._with_features(as_outputs(self.module(x)), len(x))
        return made, {name: holder[key] for name, (holder, key) in self._statistics.items()} if self.tracking else {}

    def _look(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._seen = inputs[0] if inputs else None

    def _with_features(self, made: Outputs, batch: int) -> Outputs:
        seen, self._seen = self._seen, None  # not held on to: it may have a whole graph behind it
        if "features" in made.taps or not _is_batch(seen, batch):
            return made
        # channel by channel, so that devices side by side stay apart
        return made._replace(taps={**made.taps, "features": seen.flatten(1)})


def _is_batch(seen: Any, batch: int) -> bool:
    return isinstance(seen, Tensor) and seen.is_floating_point() and seen.dim() > 1 and len(seen) == batch


def _slots(module: nn.Module) -> dict[str, list[tuple[dict[str, Any], str]]]:
    """Where each weight is held; a weight shared by two layers has one name and two places."""
    names: dict[int, str] = {}
    places: dict[str, list[tuple[dict[str, Any], str]]] = {}
    for name, weight in module.named_parameters(remove_duplicate=False):
        owner, _, key = name.rpartition(".")
        known = names.setdefault(id(weight), name)
        places.setdefault(known, []).append((module.get_submodule(owner)._parameters, key))
    return places


def statistic_slots(module: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Where each batch norm holds the statistics it is judged with."""
    return {
        f"{name}.{key}".lstrip("."): (part._buffers, key)
        for name, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats
        for key in STATISTICS
    }


def folded(skeleton: FunctionalModule) -> Block:
    def run(weights: Mapping[str, Tensor], x: Tensor) -> Made:
        devices = len(x)
        made, tracked = skeleton(weights, fold(x))
        return (
            tree_map(lambda tensor: unfold(tensor, devices), made),
            {name: tensor.unflatten(0, (devices, -1)) for name, tensor in tracked.items()},
        )

    return run


def vmapped(skeleton: FunctionalModule) -> Block:
    run = vmap(skeleton, randomness="error")
    return lambda weights, x: run(dict(weights), x)


def one_by_one(skeleton: FunctionalModule) -> Block:
    def run(weights: Mapping[str, Tensor], x: Tensor) -> Made:
        made = [skeleton({name: weight[k] for name, weight in weights.items()}, x[k]) for k in range(len(x))]
        return cast(Made, tree_map(lambda *alike: torch.stack(alike), *made))

    return run


def alone(skeleton: FunctionalModule, shapes: Mapping[str, torch.Size], sample: Tensor) -> Block:
    """One device: images channels-last, which is faster, unless the module insists on the plain layout."""

    def channels_last(weights: Mapping[str, Tensor], x: Tensor) -> Made:
        made = skeleton({name: weight[0] for name, weight in weights.items()}, fold(x))
        return cast(Made, tree_map(lambda tensor: tensor.unsqueeze(0), made))

    weights, x = trial(shapes, sample, torch.get_default_dtype())
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            channels_last({name: weight[:1] for name, weight in weights.items()}, x[:1])
    except RuntimeError:  # such as a .view() of a map that is not contiguous
        return one_by_one(skeleton)
    return channels_last


def seeded(block: Block, seeds: tuple[int, ...]) -> Block:
    """Each device's random layers draw from its own seed, whoever it shares the block with."""

    def run(weights: Mapping[str, Tensor], x: Tensor) -> Made:
        made = []
        with torch.random.fork_rng(devices=[]):
            for k, seed in enumerate(seeds):
                torch.manual_seed(seed)
                made.append(block({name: weight[k : k + 1] for name, weight in weights.items()}, x[k : k + 1]))
        return cast(Made, tree_map(lambda *alike: torch.cat(alike), *made))

    return run


def fastest(
    skeleton: FunctionalModule, shapes: Mapping[str, torch.Size], sample: Tensor
) -> tuple[BatchingMode, tuple[str, ...]]:
    """The fastest way that is right for a module, and why faster ones are not.

    None is trusted unseen: a few devices with random weights must make of `sample` what each makes alone. `skeleton` is
    the module in double precision, where right and wrong are far apart. A module with a part that says `folds = False`
    is not folded, and that is no reason to warn: its activations have no channels to lay side by side.
    """
    reasons: list[str] = []
    for way in (folded, vmapped) if folds(skeleton.module) else (vmapped,):
        try:
            if _agree(way(skeleton), one_by_one(skeleton), shapes, sample):
                return way, tuple(reasons)
            reason = "devices mix"
        except Exception as error:  # whatever a stranger's module raises, there is a slower way
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        reasons.append(f"{type(skeleton.module).__name__} does not run {way.__name__}: {reason}")
    return one_by_one, tuple(reasons)


def is_random(skeleton: FunctionalModule, shapes: Mapping[str, torch.Size], sample: Tensor) -> bool:
    """Whether the module draws random numbers, as dropout does: torch's own stream then moves on."""
    weights, x = trial(shapes, sample, torch.get_default_dtype())
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        one_by_one(skeleton)(weights, x)
        return not torch.equal(before, torch.get_rng_state())


def trial(shapes: Mapping[str, torch.Size], sample: Tensor, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    """Random weights for as many devices as the sample has, and the sample."""
    draw, devices = torch.Generator().manual_seed(0), len(sample)
    weights = {name: torch.rand(devices, *shape, generator=draw, dtype=dtype) - 0.3 for name, shape in shapes.items()}
    for name in weights:
        if name.endswith(STATISTICS[1]):
            weights[name] = weights[name].abs() + 0.1
    return weights, sample.to(dtype) if sample.is_floating_point() else sample


@torch.no_grad()
def _agree(left: Block, right: Block, shapes: Mapping[str, torch.Size], sample: Tensor) -> bool:
    weights, x = trial(shapes, sample, torch.float64)
    pairs = zip(tree_leaves(left(weights, x)), tree_leaves(right(weights, x)), strict=True)
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-6, atol=1e-9) for a, b in pairs)


ENOUGH = 16
"""So many sizes of a kind are tried; if all run alike, further ones are taken to. A fleet has fewer; methods that draw
a sub-net for every step would do little else than try them."""

Fact = TypeVar("Fact")


@dataclass(frozen=True)
class Kind:
    """Nets of a family that differ in whole numbers alone, such as channels, depths and kernels, and are made of the
    same layers."""

    build: "Family"
    settings: tuple[tuple[str, Any], ...]
    layers: frozenset[Any]


def block_of(model: "Model", devices: int, training: bool, tracking: bool = False) -> Block:
    # a skeleton holds its module's constants, and those have a precision
    made = _alone if devices == 1 else _many
    return made(model, training, tracking, torch.get_default_dtype())


@lru_cache(maxsize=256)
def _skeleton(model: "Model", training: bool, tracking: bool, dtype: torch.dtype) -> FunctionalModule:
    return FunctionalModule(model.module().to(dtype), training, tracking)


@lru_cache(maxsize=256)
def _alone(model: "Model", training: bool, tracking: bool, dtype: torch.dtype) -> Block:
    return alone(_skeleton(model, training, tracking, dtype), all_shapes(model), trial_examples(model))


@lru_cache(maxsize=256)
def _many(model: "Model", training: bool, tracking: bool, dtype: torch.dtype) -> Block:
    way, reasons = fastest_of(model, training, tracking)
    if reasons:
        warnings.warn(f"a slower way is used ({'; '.join(reasons)})", SlowBlock, stacklevel=2)
    return way(_skeleton(model, training, tracking, dtype))


@lru_cache(maxsize=256)
def fastest_of(model: "Model", training: bool, tracking: bool) -> tuple[BatchingMode, tuple[str, ...]]:
    def tried() -> tuple[BatchingMode, tuple[str, ...]]:
        skeleton = FunctionalModule(model.module().double(), training, tracking)
        return fastest(skeleton, all_shapes(model), trial_examples(model))

    return _like_others(_ways(_kind(model, training, tracking), training, tracking), tried)


@lru_cache(maxsize=256)
def trains_at_random(model: "Model") -> bool:
    def tried() -> bool:
        skeleton = _skeleton(model, True, False, torch.get_default_dtype())
        return is_random(skeleton, all_shapes(model), trial_examples(model))

    return _like_others(_draws(_kind(model, training=True, tracking=False)), tried)


def _like_others(known: list[Fact], tried: Callable[[], Fact]) -> Fact:
    """What all of enough others of its kind are; else as a trial finds, which is then known too."""
    if len(known) >= ENOUGH and len(set(known)) == 1:
        return known[0]
    known.append(tried())
    return known[-1]


@lru_cache(maxsize=256)
def _ways(kind: Kind, training: bool, tracking: bool) -> list[tuple[BatchingMode, tuple[str, ...]]]:
    """Those that trials have found; a list that grows."""
    return []


@lru_cache(maxsize=256)
def _draws(kind: Kind) -> list[bool]:
    return []


def _kind(model: "Model", training: bool, tracking: bool) -> Kind:
    module = _skeleton(model, training, tracking, torch.get_default_dtype()).module
    return Kind(model.build, switches(dict(model.settings)), layers(module))


def all_shapes(model: "Model") -> "Shapes":
    return {**model.shapes(), **model.statistics()}


def trial_examples(model: "Model") -> Tensor:
    """Two for each of three devices."""
    return model.sample(torch.Generator().manual_seed(0), 3, 2)
