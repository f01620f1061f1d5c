"""A fake accelerator: tensors live on the torch device "loom", and CPU kernels compute them.

It finds what a GPU would punish, on a machine without one: operations that mix devices raise, as does a value that is
read back inside a task; copies across are counted; large tensors can be made not to fit into memory. Results are
bit-identical to the CPU's. It is torch's PrivateUse1 backend, so there is one in a process.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ..client import fit
from ..engines.in_process import run_task

NAME = "loom"
DEVICES = 2

aten = torch.ops.aten

READ_BACKS = frozenset(
    {
        aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.masked_select.default,
        aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default, aten.bincount.default,
        aten.repeat_interleave.Tensor,
    }
)  # fmt: skip
"""Operations for which the CPU waits: those that return a value, and those whose result's shape depends on values."""

MASKED = frozenset({aten.index.Tensor, aten.index_put.default, aten.index_put_.default})
"""Operations that read back if an index is a mask."""


class DevicesMixedError(RuntimeError):
    """An operation has tensors of two devices."""


class ReadBackError(RuntimeError):
    """A value was read back inside a task."""


@dataclass
class FakeAccelerator:
    """What happened on the fake accelerator in this process.

    Parameters
    ----------
    copies_in : how often something was copied from the CPU.
    copies_out : how often something was copied to the CPU.
    read_backs : how often the CPU waited for a value outside of tasks; inside a task that raises.
    copies_in_steps : copies to or from the CPU in the step loop of `fit`.
    largest_tensor : in bytes; a larger one does not fit into memory. None: all fit.
    refused : how often a tensor did not fit.
    sizes : direction and bytes of every copy, in their order.
    """

    copies_in: int = 0
    copies_out: int = 0
    read_backs: int = 0
    copies_in_steps: int = 0
    largest_tensor: int | None = None
    refused: int = 0
    sizes: list[tuple[str, int]] = field(default_factory=list)

    def reset(self) -> None:
        """Count from zero again; everything fits into memory."""
        for name, value in vars(FakeAccelerator()).items():
            setattr(self, name, value)

    @contextmanager
    def memory(self, largest_tensor: int) -> Iterator[None]:
        """While it lasts, tensors of more bytes do not fit into memory.

        Parameters
        ----------
        largest_tensor : in bytes.
        """
        before, self.largest_tensor = self.largest_tensor, largest_tensor
        try:
            yield
        finally:
            self.largest_tensor = before

    def copied(self, direction: str, tensor: Tensor) -> None:
        """Count a copy across.

        Parameters
        ----------
        direction : "in" or "out".
        tensor : what was copied.
        """
        if direction == "in":
            self.copies_in += 1
        else:
            self.copies_out += 1
        self.sizes.append((direction, tensor.numel() * tensor.element_size()))
        if _is_inside(_step_code()):
            self.copies_in_steps += 1

    def read_back(self, operation: Any) -> None:
        """Count a read-back, which raises inside a task.

        Parameters
        ----------
        operation : the operation that the CPU waits for.
        """
        if _is_inside(run_task.__code__):
            raise ReadBackError(f"{operation} waits for a value of the accelerator inside a task")
        self.read_backs += 1

    def allocate(self, tensor: Tensor) -> None:
        """Raise if a new tensor does not fit.

        Parameters
        ----------
        tensor : the tensor.
        """
        size = tensor.numel() * tensor.element_size()
        if self.largest_tensor is not None and size > self.largest_tensor:
            self.refused += 1
            raise torch.OutOfMemoryError(f"{NAME} out of memory. Tried to allocate {size} bytes.")


def _is_inside(code: CodeType) -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@cache
def _step_code() -> CodeType:
    code: CodeType = fit.__wrapped__.__code__  # type: ignore[attr-defined]
    return code


class LoomTensor(Tensor):
    """A tensor on the fake accelerator, around one on the CPU."""

    plain: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> "LoomTensor":
        with torch.inference_mode(False):  # a view of an ordinary tensor must be one too
            made: LoomTensor = Tensor._make_wrapper_subclass(
                cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
                device=device,
            )  # fmt: skip
        made.plain = inner
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LoomTensor({self.plain!r}, device={str(self.device)!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func is aten.copy_.default or func is aten._copy_from.default:
        source, target = (args[1], args[0]) if func is aten.copy_.default else (args[0], args[1])
        return _copy(target, source)
    flat, spec = tree_flatten((args, kwargs))
    own = [one for one in flat if isinstance(one, LoomTensor)]
    wanted = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    if wanted is not None and wanted.type != NAME:
        if func is not aten._to_copy.default:
            raise DevicesMixedError(f"{func} from {own[0].device} to {wanted}")
        accelerator().copied("out", args[0])
        return func(args[0].plain, **{**kwargs, "pin_memory": None} if "pin_memory" in kwargs else kwargs)
    device = _with_index(wanted) if wanted is not None else own[0].device
    _refuse_mixing(func, flat, own)
    if func in READ_BACKS or (func in MASKED and any(_is_mask(one) for one in own[1:])):
        accelerator().read_back(func)
    plain = [one.plain if isinstance(one, LoomTensor) else one for one in flat]
    plain_args, plain_kwargs = tree_unflatten(plain, spec)
    if wanted is not None:
        plain_kwargs = {**plain_kwargs, "device": torch.device("cpu")}
    plain_kwargs.pop("pin_memory", None)
    results = func(*plain_args, **plain_kwargs)
    known = {id(one.plain): one for one in own}
    return tree_map(lambda result: _wrap(result, device, known), results)


def _wrap(result: Any, device: torch.device, known: dict[int, LoomTensor]) -> Any:
    if not isinstance(result, Tensor) or isinstance(result, LoomTensor):
        return result
    if id(result) in known:
        return known[id(result)]
    accelerator().allocate(result)
    return LoomTensor(result, device)


def _copy(target: Tensor, source: Tensor) -> Tensor:
    into, out_of = isinstance(target, LoomTensor), isinstance(source, LoomTensor)
    is_number = into and source.dim() == 0 and target.dim() > 0  # as fill_, which sends it with the kernel
    if into != out_of and not is_number:
        accelerator().copied("in" if into else "out", source)
    plain = [one.plain if isinstance(one, LoomTensor) else one for one in (target, source)]
    plain[0].copy_(plain[1])
    return target


def _refuse_mixing(func: Any, flat: list[Any], own: list[LoomTensor]) -> None:
    """As a GPU does: a number of the CPU may take part, any other tensor of another device may not."""
    devices = {one.device for one in own}
    foreign = [one for one in flat if isinstance(one, Tensor) and not isinstance(one, LoomTensor) and one.dim() > 0]
    if len(devices) > 1 or (own and foreign):
        found = sorted({*map(str, devices), *(str(one.device) for one in foreign)})
        raise DevicesMixedError(f"Expected all tensors to be on the same device; {func} got {' and '.join(found)}")


def _is_mask(tensor: LoomTensor) -> bool:
    return tensor.dtype in (torch.bool, torch.uint8)


def _with_index(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device(NAME, 0)


class _Backend:
    """What torch asks the module of a backend."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return DEVICES

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass


@cache
def accelerator() -> FakeAccelerator:
    """Register the device "loom" with torch, once, and return what counts its copies.

    Returns
    -------
    FakeAccelerator

    Examples
    --------
    >>> from fedloom.testing import TinyWorld, accelerator
    >>> from fedloom.placement import Compute
    >>> loom = accelerator()
    >>> engine = world.engine(method, compute=Compute("loom"))
    """
    _register()
    return FakeAccelerator()


@cache
def _register() -> tuple[torch.library.Library, torch.library.Library]:
    """Cached, since what they register lasts as long as the libraries do."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    # torch starts threads for the devices that it knows at the first backward pass, and then cannot be forked any more;
    # blocks compute gradients without them
    number = torch.zeros((), requires_grad=True)
    torch.autograd.grad(2 * number, number)
    _setup_privateuseone_for_python_backend(NAME, _Backend())
    library = torch.library.Library("aten", "IMPL")
    for operation in (aten.empty.memory_format, aten.empty_strided.default):
        library.impl(operation, _factory(operation), "PrivateUse1")
    library.impl(aten._copy_from.default, lambda source, target, *_: _copy(target, source), "PrivateUse1")
    library.impl(aten.native_group_norm.default, _group_norm, "AutogradPrivateUse1")
    every = torch.library.Library("_", "IMPL")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # autocast changes nothing
    return library, every


def _group_norm(*args: Any) -> Any:
    return _GroupNorm.apply(*args)  # type: ignore[no-untyped-call]


class _GroupNorm(torch.autograd.Function):
    """Group norm with the CPU's backward pass: torch lays the maps out otherwise on any other device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, *sizes: Any) -> Any:
        output, mean, inverse = _run(aten.native_group_norm.default, (x, weight, bias, *sizes), {})
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.sizes = sizes
        ctx.mark_non_differentiable(mean, inverse)
        return output, mean, inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        x, weight, mean, inverse = ctx.saved_tensors
        n, channels, size, groups, _ = ctx.sizes
        is_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        layout = torch.channels_last if is_last else torch.contiguous_format
        grad, x = grad.contiguous(memory_format=layout), x.contiguous(memory_format=layout)
        needed = list(ctx.needs_input_grad[:3])
        backward = aten.native_group_norm_backward.default
        return *backward(grad, x, mean, inverse, weight, n, channels, size, groups, needed), *[None] * 5


def _factory(operation: Any) -> Any:
    def make(*args: Any, device: Any = None, pin_memory: Any = None, **kwargs: Any) -> Tensor:
        inner = operation(*args, device=torch.device("cpu"), **kwargs)
        accelerator().allocate(inner)
        return LoomTensor(inner, _with_index(torch.device(device or NAME)))

    return make
