"""A model: a family and its settings, as a pure function of the weights of a block of devices.

A family is any function from keyword settings to a plain `nn.Module`. How two models of a family relate is never
written down: it is found by comparing the shapes of their weights.
"""

import inspect
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..seeds import number
from ..tensors import Tensors
from .blocks import Block, Skeleton, SlowBlock, Way, alone, fastest, is_random, seeded, statistic_slots, trial

Family = Callable[..., nn.Module]
Shapes = Mapping[str, torch.Size]

STACKING = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)


class Outputs(NamedTuple):
    """What a module makes of a batch; a module that returns one tensor has one exit."""

    exits: Mapping[str, Tensor]  # exit name -> logits [K, batch, classes], shallow to deep
    taps: Mapping[str, Tensor]  # stage name -> features [K, batch, channels, ...]

    @property
    def logits(self) -> Tensor:
        return list(self.exits.values())[-1]


@dataclass(frozen=True)
class Draws:
    """Training mode, and where its randomness comes from: one seed per device, for this step alone."""

    seeds: tuple[int, ...]
    common: int = 0  # one for all devices of an experiment, for this step


@dataclass(frozen=True)
class Model:
    family: str
    build: Family
    settings: tuple[tuple[str, Any], ...]
    input_shape: tuple[int, ...]
    classes: int

    def __call__(self, weights: Tensors, x: Tensor, draws: Draws | None = None) -> Outputs:
        """[K, ...] weights and [K, batch, ...] inputs -> outputs with the devices in front."""
        if draws is None:
            self._require_statistics(weights)
            block = _block(self, len(x), training=False)
        elif _is_random(self):
            block = seeded(_block(self, 1, training=True), draws.seeds)
        else:
            block = _block(self, len(x), training=True)
        made, _ = block(weights, x)
        return made if isinstance(made, Outputs) else Outputs({"logits": made}, {})

    def batch_statistics(self, weights: Tensors, x: Tensor) -> dict[str, Tensor]:
        """What every batch norm sees in this batch: its mean and unbiased variance, [K, channels] each.

        As the model is judged, not as it trains: statistics taken with the width scaler on would be of other numbers.
        """
        return _block(self, len(x), training=False, tracking=True)(weights, x)[1]

    def shapes(self) -> Shapes:
        """Of the weights, which are trained and sent."""
        return _shapes(self)[0]

    def statistics(self) -> Shapes:
        """Of the normalisation statistics, which are neither; empty for most normalisations."""
        return _shapes(self)[1]

    def initial(self, seed: int) -> dict[str, Tensor]:
        """The weights as the family draws them."""
        return dict(_initial(self, seed, torch.get_default_dtype()))

    def module(self, seed: int = 0) -> nn.Module:
        """The plain module, drawn from a seed without touching anybody else's randomness."""
        with torch.inference_mode(False), torch.random.fork_rng(devices=[]):  # it outlives whoever first asked for it
            torch.manual_seed(seed)
            return self.build(**dict(self.settings)).to(torch.get_default_dtype())

    def fits_the_data(self) -> None:
        """Raise unless the module makes one logit per class out of examples of the right shape."""
        made = _logits_made(self)
        if made != self.classes:
            raise ValueError(f"it makes {made} logits where the data has {self.classes} classes")

    def resized(self, **changes: Any) -> "Model":
        """Another size of the same family."""
        return replace(self, settings=tuple(sorted({**dict(self.settings), **changes}.items())))

    def spelled_out(self) -> dict[str, Any]:
        """All settings, also those that are left to the family."""
        named = inspect.signature(self.build).parameters
        return {**{name: p.default for name, p in named.items() if p.default is not p.empty}, **dict(self.settings)}

    def label_rows(self) -> tuple[str, ...]:
        """The weights that have one row per class: those of the last layer, or what the module names itself."""
        return _label_rows(self)

    def behind_last_exit(self) -> tuple[str, ...]:
        """The weights that the last exit depends on: all but those of earlier exits' own heads."""
        return _behind_last_exit(self)

    def mixes_examples(self) -> bool:
        """Whether what it makes of an example, when judged, depends on the others in the batch."""
        return _mixes_examples(self)

    def slow_reasons(self) -> tuple[str, ...]:
        """Why many devices cannot train as one network; empty when they can."""
        return _fastest(self, True, False)[1]

    def unsliceable(self) -> tuple[str, ...]:
        """Weights of layers that stack several things on one axis, so that its first part means nothing."""
        return _unsliceable(self)

    def _require_statistics(self, weights: Tensors) -> None:
        missing = [name for name in self.statistics() if name not in weights]
        if missing:
            raise ValueError(f"{self.family} is judged with batch-norm statistics; {missing[0]} was not given")


def model(family: str, build: Family, settings: Mapping[str, Any], input_shape: tuple[int, ...], classes: int) -> Model:
    """A model of a family; what the data decides is passed on if the family names it."""
    facts = {"input_shape": input_shape, "classes": classes}
    named = inspect.signature(build).parameters
    known = {name: fact for name, fact in facts.items() if name in named}
    for name, value in settings.items():
        if not isinstance(value, Hashable):
            raise TypeError(f"{name} = {value!r} cannot be a setting: use a number, a text, a list or a truth value")
    return Model(family, build, tuple(sorted({**known, **settings}.items())), input_shape, classes)


def _block(model: Model, devices: int, training: bool, tracking: bool = False) -> Block:
    # a skeleton holds its module's constants, and those have a precision
    made = _alone if devices == 1 else _many
    return made(model, training, tracking, torch.get_default_dtype())


@lru_cache(maxsize=256)
def _skeleton(model: Model, training: bool, tracking: bool, dtype: torch.dtype) -> Skeleton:
    return Skeleton(model.module().to(dtype), training, tracking)


@lru_cache(maxsize=256)
def _alone(model: Model, training: bool, tracking: bool, dtype: torch.dtype) -> Block:
    return alone(_skeleton(model, training, tracking, dtype), _all_shapes(model), _sample(model))


@lru_cache(maxsize=256)
def _many(model: Model, training: bool, tracking: bool, dtype: torch.dtype) -> Block:
    way, reasons = _fastest(model, training, tracking)
    if reasons:
        warnings.warn(f"a slower way is used ({'; '.join(reasons)})", SlowBlock, stacklevel=2)
    return way(_skeleton(model, training, tracking, dtype))


@lru_cache(maxsize=256)
def _fastest(model: Model, training: bool, tracking: bool) -> tuple[Way, tuple[str, ...]]:
    skeleton = Skeleton(model.module().double(), training, tracking)
    return fastest(skeleton, _all_shapes(model), _sample(model))


@lru_cache(maxsize=256)
def _is_random(model: Model) -> bool:
    return is_random(_skeleton(model, True, False, torch.get_default_dtype()), _all_shapes(model), _sample(model))


def _all_shapes(model: Model) -> Shapes:
    return {**model.shapes(), **model.statistics()}


def _sample(model: Model) -> Tensor:
    """Made-up examples for trials: two for each of three devices, no two alike."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(3, 2, *model.input_shape, generator=draw)


@lru_cache(maxsize=1024)
def _logits_made(model: Model) -> int:
    module = model.module().eval()
    with torch.no_grad():
        made = module(torch.zeros(2, *model.input_shape))
    return int((made.logits if isinstance(made, Outputs) else made).shape[-1])


@lru_cache(maxsize=1024)
def _shapes(model: Model) -> tuple[Shapes, Shapes]:
    module = model.module()
    weights = {name: weight.shape for name, weight in module.named_parameters()}
    return weights, {name: holder[key].shape for name, (holder, key) in statistic_slots(module).items()}


@lru_cache(maxsize=32)
def _initial(model: Model, seed: int, dtype: torch.dtype) -> Tensors:
    """Kept, so that ten thousand devices that start alike hold one copy between them."""
    module = model.module(number(seed, "initial weights"))
    return {name: weight.detach().clone() for name, weight in module.named_parameters()}


@lru_cache(maxsize=1024)
def _label_rows(model: Model) -> tuple[str, ...]:
    module = model.module()
    declared = getattr(module, "label_rows", None)
    if declared is not None:
        return tuple(declared)
    owners = [(name, part) for name, part in module.named_modules() if list(part.parameters(recurse=False))]
    last, part = owners[-1]
    own = part.named_parameters(recurse=False)
    return tuple(f"{last}.{key}".lstrip(".") for key, weight in own if weight.shape[:1] == (model.classes,))


@lru_cache(maxsize=1024)
def _behind_last_exit(model: Model) -> tuple[str, ...]:
    with torch.inference_mode(False), torch.enable_grad():
        module = model.module().train()
        made = module(torch.zeros(2, *model.input_shape))
        logits = made.logits if isinstance(made, Outputs) else made
        names, weights = zip(*module.named_parameters(), strict=True)
        slopes = torch.autograd.grad(logits.sum(), weights, allow_unused=True)
    return tuple(name for name, slope in zip(names, slopes, strict=True) if slope is not None)


@lru_cache(maxsize=1024)
def _mixes_examples(model: Model) -> bool:
    weights, x = trial(_all_shapes(model), _sample(model), torch.get_default_dtype())
    with torch.no_grad():
        together, alone = model(weights, x), model(weights, x[:, :1])
    return not torch.allclose(together.logits[:, :1], alone.logits, rtol=1e-3, atol=1e-5)


@lru_cache(maxsize=1024)
def _unsliceable(model: Model) -> tuple[str, ...]:
    return tuple(
        f"{owner}.{name}".lstrip(".")
        for owner, part in model.module().named_modules()
        if isinstance(part, STACKING)
        for name, _ in part.named_parameters()
    )
