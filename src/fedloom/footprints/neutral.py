"""Run a module so that only its wiring counts: which number goes where, not how widths enter the arithmetic.

A narrower net computes other numbers than a slice of the wide one even if every weight is in its place: it normalizes
over fewer channels, and divides attention scores by the root of a smaller head. Under `NeutralArithmetic` operations
whose result depends on a width are replaced by element-wise ones that map zero to zero, and constant factors are left
out. The same replacements in both nets leave only mistakes of wiring to be seen.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from ..models.randomness import DispatchMode

aten = torch.ops.aten

MASKED = -1e4
"""Attention scores below it are masked."""


@contextmanager
def neutral_arithmetic() -> Iterator[None]:
    """In double precision, without gradients, dropout and fused operations, and with `NeutralArithmetic`."""
    dtype, fused = torch.get_default_dtype(), torch.backends.mha.get_fastpath_enabled()
    with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are given where the module is used
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with sdpa_kernel(SDPBackend.MATH), NeutralArithmetic():  # type: ignore[no-untyped-call]
                yield
        finally:
            torch.set_default_dtype(dtype)
            torch.backends.mha.set_fastpath_enabled(fused)


class NeutralArithmetic(DispatchMode):
    """Replaces operations that depend on a width, wherever in a module they are called."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        replacement = REPLACEMENTS.get(func.overloadpacket)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        return replacement(func, *args, **(kwargs or {}))


def _squash(x: Tensor) -> Tensor:
    """Bounded and increasing, so that different inputs stay different; zero stays zero."""
    return x / (1 + x.abs())


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, trailing: int) -> Tensor:
    """With one weight per entry of a dimension that has `trailing` others behind it."""
    for values, combine in ((weight, torch.mul), (bias, torch.add)):
        if values is not None:
            x = combine(x, values.reshape(*values.shape, *[1] * trailing))
    return x


def _layer_norm(
    func: Any, x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    result = _affine(_squash(x), weight, bias, 0)
    return result, result.new_empty(0), result.new_empty(0)


def _rms_norm(
    func: Any, x: Tensor, shape: Any, weight: Tensor | None = None, *settings: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    result = _affine(_squash(x), weight, None, 0)
    return result, result.new_empty(0)


def _group_norm(
    func: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    result = _affine(_squash(x), weight, bias, x.dim() - 2)
    return result, result.new_empty(0), result.new_empty(0)


def _softmax(func: Any, x: Tensor, *settings: Any, **named: Any) -> Tensor:
    return _squash(x.masked_fill(x < MASKED, 0))


def _mean(func: Any, x: Tensor, dim: Any = None, keepdim: bool = False, **named: Any) -> Tensor:
    """The sum, to which zeros add nothing: hand-written norms divide by the mean of squares."""
    return x.sum() if dim is None else x.sum(dim, keepdim)


def _variance(func: Any, x: Tensor, dim: Any = None, *settings: Any, keepdim: bool = False, **named: Any) -> Tensor:
    return x.square().sum() if dim is None or isinstance(dim, bool) else x.square().sum(dim, keepdim)


def _std(func: Any, x: Tensor, *settings: Any, **named: Any) -> Tensor:
    return _variance(func, x, *settings, **named).sqrt()


def _variance_and_mean(func: Any, x: Tensor, *settings: Any, **named: Any) -> tuple[Tensor, Tensor]:
    variance = _variance(func, x, *settings, **named)
    return variance, torch.zeros_like(variance)


def _scale(func: Any, x: Any, factor: Any, **named: Any) -> Tensor:
    """Multiplication or division; only the sign of a constant factor is kept, and zero. Indices stay as they are."""
    is_product = func.overloadpacket in (aten.mul, aten.mul_)
    if _is_constant(x) and not _is_constant(factor) and is_product:
        x, factor = factor, x
    is_index = isinstance(x, Tensor) and not x.is_floating_point() and is_product and not _is_float(factor)
    if named or is_index or not isinstance(x, Tensor) or not _is_constant(factor):
        return func(x, factor, **named)  # type: ignore[no-any-return]
    return func(x, float((float(factor) > 0) - (float(factor) < 0)))  # type: ignore[no-any-return]


def _is_float(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())


def _is_constant(value: Any) -> bool:
    """A number, or a tensor of one that is no weight."""
    return isinstance(value, int | float) or (
        isinstance(value, Tensor) and value.dim() == 0 and not isinstance(value, nn.Parameter)
    )


def _dropout(func: Any, x: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    return x.clone(), torch.ones_like(x, dtype=torch.bool)


def _to_copy(func: Any, x: Tensor, *, dtype: torch.dtype | None = None, **named: Any) -> Tensor:
    """Never to less than double precision."""
    is_lower = dtype is not None and dtype.is_floating_point and x.is_floating_point()
    return func(x, dtype=torch.float64 if is_lower else dtype, **named)  # type: ignore[no-any-return]


def _weight_norm(func: Any, direction: Tensor, length: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    return direction * length, length


def _zeros(func: Any, *args: Any, **named: Any) -> Any:
    """What is drawn at random, in any size, is zero."""
    return tree_map(lambda value: torch.zeros_like(value) if isinstance(value, Tensor) else value, func(*args, **named))


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    aten.native_layer_norm: _layer_norm,
    aten.native_group_norm: _group_norm,
    aten._fused_rms_norm: _rms_norm,
    aten._softmax: _softmax,
    aten._safe_softmax: _softmax,
    aten.mean: _mean,
    aten.var: _variance,
    aten.std: _std,
    aten.var_mean: _variance_and_mean,
    aten.mul: _scale,
    aten.mul_: _scale,
    aten.div: _scale,
    aten.div_: _scale,
    aten.native_dropout: _dropout,
    aten._to_copy: _to_copy,
    aten._weight_norm_interface: _weight_norm,
    aten.randn: _zeros,
    aten.rand: _zeros,
    aten.randn_like: _zeros,
    aten.rand_like: _zeros,
}
