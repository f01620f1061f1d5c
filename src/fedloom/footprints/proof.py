"""Prove that the footprint of a small model is a smaller net, and not a cut across heads, gates or concatenated maps.

Random weights of the small model are written through its footprint into an all-zero copy of the large one. If every
weight is in its place, both nets compute the same, up to arithmetic that depends on a width, which is replaced
(`neutral.py`). What is not proved is refused, with the name of the first layer that differs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from ..models import Model, Outputs
from ..models.batching import statistic_slots
from ..models.structure import as_outputs
from .footprint import block_index, find_footprint
from .neutral import neutral_arithmetic

TOLERANCE = 1e-9
"""The largest difference, relative to the largest number. In double precision a correct footprint stays far below."""

EXAMPLES = 2

HINT = (
    "declare what the axes stack in the module's `stacked_axes`, give every tier the same size of this layer, or use a "
    "method for unrelated models"
)


@lru_cache(maxsize=1024)
def find_slicing_problem(small: Model, large: Model) -> str | None:
    """Why the part of a large model that a small one covers does not compute what the small one does; None if it does.

    There is nothing to prove if every weight has the same size in both, or if the large model's module declares
    `sliceable = True`. A submodule that declares it is left out of the proof.

    Parameters
    ----------
    small : the small model, all of whose weights have a place in the large one.
    large : the large model.
    """
    shapes = {**large.shapes(), **large.frozen_shapes()}
    narrower = [name for name, shape in {**small.shapes(), **small.frozen_shapes()}.items() if shape != shapes[name]]
    if not narrower:
        return None
    modules = small.module().double().eval(), large.module().double().eval()
    if is_trusted(modules[1]):
        return None
    extra = _write_random_weights(small, large, *modules)
    x, like = small.random_inputs(_generator(), EXAMPLES), large.zero_inputs(EXAMPLES)
    try:
        return Trial(*modules, extra, x, like).find_problem(narrower)
    except Exception as error:  # a user's module may raise anything
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"that it is a smaller net cannot be tried, because it does not run: {text}"


def is_trusted(module: nn.Module) -> bool:
    """True if a module declares `sliceable = True`: that it was checked that the small one is a part of the large."""
    return getattr(module, "sliceable", False) is True


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _write_random_weights(small: Model, large: Model, inner: nn.Module, outer: nn.Module) -> frozenset[str]:
    """Put the same weights into both modules, and zero elsewhere; returns the names that only the large one has."""
    generator, parts, wholes = _generator(), _tensors(inner), _tensors(outer)
    for part in parts.values():
        part.copy_(_random_weight(part, generator))
    for name, whole in wholes.items():
        whole.fill_(1 if name.endswith("running_var") else 0)
    for shapes, larger in (
        (small.shapes(), large.shapes()),
        (small.frozen_shapes(), large.frozen_shapes()),
        (small.statistics(), large.statistics()),
    ):
        for name, block in find_footprint(shapes, larger).blocks.items():
            wholes[name][block_index(wholes[name], block)] = parts[name]
    return frozenset(wholes.keys() - parts.keys())


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Weights and batch-norm statistics."""
    statistics = {name: holder[key] for name, (holder, key) in statistic_slots(module).items()}
    return {**{name: weight.data for name, weight in module.named_parameters()}, **statistics}


def _random_weight(like: Tensor, generator: torch.Generator) -> Tensor:
    """Mostly positive, so that ReLUs let numbers through, and scaled so that these neither vanish nor explode."""
    if not like.is_floating_point():
        return like
    values = torch.rand(like.shape, generator=generator, dtype=torch.float64)
    if like.dim() < 2:
        return values + 0.1
    inputs = max(1, like.numel() // len(like))
    return (values - 0.3) / (0.2 * inputs + 0.3 * math.sqrt(inputs))


class Call(NamedTuple):
    """One call of a submodule: its name, and its input and output."""

    name: str
    received: Any
    made: Any


@dataclass(frozen=True)
class Trial:
    """Both modules with the same weights, and an input.

    Parameters
    ----------
    small : the small module.
    large : the large one.
    extra : the weights that only the large one has; they are zero.
    x : the input of the small one.
    like : the shape of the large one's, of which the small one may take the first part.
    """

    small: nn.Module
    large: nn.Module
    extra: frozenset[str]
    x: Tensor
    like: Tensor

    def find_problem(self, narrower: Sequence[str]) -> str | None:
        """Run both, with the layers that only the large one has as zero, or, if that differs, passed over."""
        trusted = [name for name, layer in self.large.named_modules() if is_trusted(layer)]
        with _recording(self.small, trusted) as calls:
            expected = self._run(self.small)
        given: dict[str, list[Any]] = {name: [] for name in trusted}
        for call in calls:
            given[call.name].append(call.made)
        ways = [_Replaced(given), *([_Replaced(given, self._extra_layers())] if self.extra else [])]
        for way in ways:
            with way.applied_to(self.large):
                found = self._run(self.large)
            if _exits_agree(expected, found):
                return None
        return self._explain(ways[-1], narrower)

    def _run(self, module: nn.Module) -> Outputs:
        x = self.x.double() if self.x.is_floating_point() else self.x
        with neutral_arithmetic():
            return as_outputs(module(_resize(x.clone(), self.like) if module is self.large else x.clone()))

    def _extra_layers(self) -> frozenset[str]:
        """The outermost submodules that only the large model has."""
        own = {name for name, _ in self.small.named_modules()}
        names = [
            name
            for name, layer in self.large.named_modules()
            if name and any(f"{name}.{key}" in self.extra for key, _ in layer.named_parameters()) and name not in own
        ]
        return frozenset(name for name in names if name.rpartition(".")[0] not in names)

    def _explain(self, way: "_Replaced", narrower: Sequence[str]) -> str:
        names = [name for name, _ in self.small.named_modules() if name]
        with _recording(self.small, names) as expected:
            self._run(self.small)
        with way.applied_to(self.large), _recording(self.large, names) as found:
            self._run(self.large)
        other = _foreign_constant(self.small, self.large)
        constant = f" (its constant {other} has other values than in the global model)" if other else ""
        before, first = _first_difference(expected, found)
        if first is None:
            return (
                f"the part of the global model that it covers computes other outputs{constant}, although all layers "
                f"agree: the module's own forward uses {', '.join(narrower[:2])} in another order; {HINT}"
            )
        layer = f"{first.name} ({type(self.small.get_submodule(first.name)).__name__})"
        if before.received_agrees:
            why = f"{layer} computes something else from the same numbers: they or its weight stack several things"
        else:
            after = f"after {before.name}" if before.name else "at the beginning"
            why = (
                f"{layer} receives something else: what is computed {after} stacks several things on one axis, "
                "such as heads, packed projections or concatenated channels"
            )
        if self.extra:
            why += f", or depends on layers that only the global model has, such as that of {min(self.extra)}"
        return f"the part of the global model that it covers is not the smaller net{constant}. {why}; {HINT}"


class _Before(NamedTuple):
    name: str
    received_agrees: bool


def _first_difference(expected: Sequence[Call], found: Sequence[Call]) -> tuple[_Before, Call | None]:
    """The first call whose output differs, and what is known before it: the last that agrees, and its input."""
    later: dict[str, list[Call]] = {}
    for call in found:
        later.setdefault(call.name, []).append(call)
    last = ""
    for call in expected:
        if not later.get(call.name):
            continue
        other = later[call.name].pop(0)
        if not _is_part(call.made, other.made):
            return _Before(last, _is_part(call.received, other.received)), call
        last = call.name
    return _Before(last, True), None


def _is_part(small: Any, large: Any) -> bool:
    """True if activations are the first channels of the others, or the same numbers between zeros."""
    pairs = zip(_float_leaves(small), _float_leaves(large), strict=False)
    return all(_is_leading(part, whole) or _has_same_numbers(part, whole) for part, whole in pairs)


def _float_leaves(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor) and value.is_floating_point()]


def _is_leading(part: Tensor, whole: Tensor) -> bool:
    if part.dim() != whole.dim() or any(a > b for a, b in zip(part.shape, whole.shape, strict=True)):
        return False
    return _is_close(part, whole[tuple(slice(0, size) for size in part.shape)])


def _has_same_numbers(part: Tensor, whole: Tensor) -> bool:
    numbers = [tensor.flatten()[tensor.flatten().abs() > 0].sort().values for tensor in (part, whole)]
    return len(numbers[0]) == len(numbers[1]) and _is_close(*numbers)


def _is_close(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or not bool(left.isfinite().all() and right.isfinite().all()):
        return False
    return not left.numel() or float((left - right).abs().max()) <= TOLERANCE * float(left.abs().max())


def _exits_agree(small: Outputs, large: Outputs) -> bool:
    """At every exit of the small model: that of the same name, or the last one, whose first logits they are.

    There must be numbers to compare.
    """
    return all(
        bool(logits.any()) and _is_leading(logits, large.exits.get(name, large.logits))
        for name, logits in small.exits.items()
    )


def _foreign_constant(small: nn.Module, large: nn.Module) -> str | None:
    """A buffer of the small module that is not the first part of the large one's."""
    skipped, wholes = statistic_slots(small), dict(large.named_buffers())
    for name, part in small.named_buffers():
        whole = wholes.get(name)
        if name not in skipped and part.is_floating_point() and whole is not None and not _is_leading(part, whole):
            return name
    return None


@contextmanager
def _recording(module: nn.Module, names: Sequence[str]) -> Iterator[list[Call]]:
    """The calls of some submodules, in the order in which they end."""
    calls: list[Call] = []

    def record(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(layer: nn.Module, args: Any, output: Any) -> None:
            copied = tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, (args, output))
            calls.append(Call(name, *copied))

        return hook

    layers = dict(module.named_modules())
    hooks = [layers[name].register_forward_hook(record(name)) for name in names if name in layers]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class _Replaced:
    """Outputs of some submodules of the large module that are replaced in a run.

    Parameters
    ----------
    given : of trusted submodules: the small model's outputs, call by call, which become the first entries.
    passed_over : submodules that return their input, as far as it fits.
    """

    given: dict[str, list[Any]]
    passed_over: frozenset[str] = frozenset()

    @contextmanager
    def applied_to(self, module: nn.Module) -> Iterator[None]:
        hooks = []
        for name, outputs in self.given.items():
            hooks.append(module.get_submodule(name).register_forward_hook(_give(list(outputs))))
        for name in self.passed_over - self.given.keys():
            hooks.append(module.get_submodule(name).register_forward_hook(_pass_over))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _give(outputs: list[Any]) -> Callable[[nn.Module, Any, Any], Any]:
    def hook(layer: nn.Module, args: Any, output: Any) -> Any:
        return tree_map(_resize, outputs.pop(0), output) if outputs else output

    return hook


def _pass_over(layer: nn.Module, args: Any, output: Any) -> Any:
    if args and isinstance(args[0], Tensor) and isinstance(output, Tensor) and args[0].dim() == output.dim():
        return _resize(args[0], output)
    return output


def _resize(value: Any, like: Any) -> Any:
    """The first entries along every axis, or zeros behind them."""
    if not isinstance(value, Tensor) or not isinstance(like, Tensor) or value.dim() != like.dim():
        return like
    missing = [size for a, b in zip(reversed(value.shape), reversed(like.shape), strict=True) for size in (0, b - a)]
    return F.pad(value, missing)
