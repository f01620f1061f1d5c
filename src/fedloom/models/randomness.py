"""Random numbers for a block of devices: every device draws what it would draw alone.

Alone, a device trains with torch's generator seeded with its seed of the step. In a block each device has such a
generator of its own, and every operation that draws (dropout, `torch.rand`, `bernoulli_`, ...) is caught where torch
runs it and done once per device, on the part of the tensor that belongs to the device. Masks therefore do not depend on
the block that a device is in.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

IN_PLACE = {
    aten.bernoulli_.float,
    aten.bernoulli_.Tensor,
    aten.cauchy_.default,
    aten.exponential_.default,
    aten.geometric_.default,
    aten.log_normal_.default,
    aten.normal_.default,
    aten.random_.default,
    aten.random_.to,
    getattr(aten.random_, "from"),
    aten.uniform_.default,
}
"""Operations that fill their first argument with random numbers."""

Draw = tuple[Tensor, Any, tuple[Any, ...]]
"""A tensor to fill, the operation that fills it, and the operation's further arguments."""


def _integers(size: Sequence[int], low: int, high: int, **options: Any) -> Draw:
    options = {**options, "dtype": options.get("dtype") or torch.int64}
    return torch.empty(size, **options), getattr(aten.random_, "from"), (low, high)


NEW_TENSOR: dict[Any, Callable[..., Draw]] = {
    aten.bernoulli.default: lambda x: (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        aten.bernoulli_.Tensor,
        (x,),
    ),
    aten.bernoulli.p: lambda x, p: (torch.empty_like(x), aten.bernoulli_.float, (p,)),
    aten.normal.float_float: lambda mean, std, size, **o: (torch.empty(size, **o), aten.normal_.default, (mean, std)),
    aten.rand.default: lambda size, **o: (torch.empty(size, **o), aten.uniform_.default, ()),
    aten.rand_like.default: lambda x, **o: (torch.empty_like(x, **o), aten.uniform_.default, ()),
    aten.randint.default: lambda high, size, **o: _integers(size, 0, high, **o),
    aten.randint.low: lambda low, high, size, **o: _integers(size, low, high, **o),
    aten.randint_like.default: lambda x, high, **o: (
        torch.empty_like(x, **o),
        getattr(aten.random_, "from"),
        (0, high),
    ),
    aten.randint_like.low_dtype: lambda x, low, high, **o: (
        torch.empty_like(x, **o),
        getattr(aten.random_, "from"),
        (low, high),
    ),
    aten.randn.default: lambda size, **o: (torch.empty(size, **o), aten.normal_.default, ()),
    aten.randn_like.default: lambda x, **o: (torch.empty_like(x, **o), aten.normal_.default, ()),
}
"""Operations that return a new tensor of random numbers, as an empty tensor and how torch fills it."""


class CannotDrawError(RuntimeError):
    """An operation draws random numbers that cannot be split by device."""


class DispatchMode(TorchDispatchMode):
    """Torch's mode that sees every operation, without the cost of importing its compiler."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would import its compiler only to switch it off, which takes a second."""
        return False


class DeviceRandomness(DispatchMode):
    """While it lasts, torch's random operations draw from one generator per device.

    Parameters
    ----------
    seeds : the seed of each device.
    axis : where tensors have the devices: 0, in front, inside `vmap`; 1, side by side with the channels, when folded.
    channels_last : whether one device alone has its maps channels-last, which `vmap` does not tell.
    """

    def __init__(self, seeds: Sequence[int], axis: int, channels_last: bool = False):
        super().__init__()  # type: ignore[no-untyped-call]
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.axis, self.channels_last = axis, channels_last
        self.is_drawing = False
        self._permutations = 0

    @contextmanager
    def draw(self, inputs: Any) -> Iterator[None]:
        """Draw for each device, in a layer with these inputs."""
        example = next((leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)), None)
        on_cpu = example is None or example.is_cpu
        in_vmap = None if example is None or (self.axis and on_cpu) else InsideVmap(example, self.channels_last)
        before, self.is_drawing = self.is_drawing, True
        try:
            with nullcontext() if before else self, in_vmap or nullcontext():
                yield
        finally:
            self.is_drawing = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_random(func):
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            raise CannotDrawError(f"{name_of(func)} with a generator of its own")
        if func in IN_PLACE:
            target, *arguments = args
            return self._fill(func, target, func, tuple(arguments), kwargs)
        if func in NEW_TENSOR:
            return self._fill(func, *NEW_TENSOR[func](*args, **kwargs), {})
        if func is aten.randperm.default and self.axis == 0:
            return self._permute(args, kwargs)
        before = torch.get_rng_state()
        result = func(*args, **kwargs)
        if not torch.equal(torch.get_rng_state(), before):  # some operations draw only if an argument says so
            torch.set_rng_state(before)
            raise CannotDrawError(name_of(func))
        return result

    @contextmanager
    def inside_vmap(self) -> Iterator[None]:
        """Tensors have the devices in front meanwhile."""
        before, self.axis = self.axis, 0
        try:
            yield
        finally:
            self.axis = before

    def _fill(self, func: Any, target: Tensor, fill: Any, arguments: tuple[Any, ...], options: Any) -> Tensor:
        if not target.is_cpu:
            return _draw_on_cpu(target, arguments, partial(self._fill, func, fill=fill, options=options))
        parts = self._per_device(func, target)
        # coins are tossed in the order of memory, dense or not; other draws differ for tensors that are not dense
        drawn = parts if fill is aten.bernoulli_.float else _as_alone(parts)
        split = [self._argument(func, argument, target) for argument in arguments]
        for device, generator in enumerate(self.generators):
            fill(drawn[device], *(choose(device) for choose in split), generator=generator, **options)
        if drawn is not parts:
            parts.copy_(drawn)
        return target

    def _per_device(self, func: Any, tensor: Tensor) -> Tensor:
        """A view [K, ...] of what belongs to each device."""
        devices = len(self.generators)
        if tensor.dim() <= self.axis or tensor.shape[self.axis] % devices:
            raise CannotDrawError(name_of(func))
        if self.axis == 0:
            if len(tensor) != devices:
                raise CannotDrawError(name_of(func))
            return tensor
        unflattened: Tensor = tensor.unflatten(1, (devices, -1))
        return unflattened.transpose(0, 1)

    def _argument(self, func: Any, argument: Any, target: Tensor) -> Callable[[int], Any]:
        """An argument of a random operation for each device: numbers are common, a tensor of chances is split."""
        if not isinstance(argument, Tensor) or argument.dim() == 0:
            return lambda device: argument
        if argument.shape != target.shape:
            raise CannotDrawError(name_of(func))
        parts = self._per_device(func, argument)
        dense = _as_alone(parts)
        if dense is not parts:
            dense.copy_(parts)
        return lambda device: dense[device]

    def _permute(self, args: Any, kwargs: Any) -> Tensor:
        """`vmap` asks for one permutation after the other."""
        generator = self.generators[self._permutations % len(self.generators)]
        self._permutations += 1
        permutation: Tensor = torch.randperm(*args, generator=generator, **kwargs)
        return permutation


class CpuDraws(DispatchMode):
    """While it lasts, tensors elsewhere are filled with the random numbers that they get on the CPU.

    Every accelerator has a generator of its own, and results would depend on where they are computed.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_random(func):
            return func(*args, **kwargs)
        if func is aten.randperm.default:
            return torch.randperm(*args, **{**kwargs, "device": "cpu"}).to(kwargs.get("device"))
        if func not in IN_PLACE and func not in NEW_TENSOR:
            return func(*args, **kwargs)
        target, fill, arguments = (args[0], func, args[1:]) if func in IN_PLACE else NEW_TENSOR[func](*args, **kwargs)
        options = kwargs if func in IN_PLACE else {}
        return _draw_on_cpu(target, tuple(arguments), lambda own, arguments: fill(own, *arguments, **options))


@contextmanager
def drawing_on_cpu(example: Tensor) -> Iterator[None]:
    """For a module that runs one device, seeded with torch's own generator: it draws on the CPU, wherever it runs.

    Parameters
    ----------
    example : its input.
    """
    if example.is_cpu:
        yield
    else:
        with CpuDraws(), InsideVmap(example):  # type: ignore[no-untyped-call]
            yield


def _draw_on_cpu(target: Tensor, arguments: tuple[Any, ...], fill: Callable[..., Any]) -> Tensor:
    """Fill a tensor that is elsewhere as one of the same layout on the CPU would be filled."""
    own = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype)
    fill(own, arguments=tuple(one.cpu() if isinstance(one, Tensor) else one for one in arguments))
    return target.copy_(own)


class InsideVmap(TorchFunctionMode):
    """Replaces calls that lose the devices' axis, or the layout in memory, inside `vmap`.

    Parameters
    ----------
    example : a tensor that has the devices' axis.
    channels_last : whether one device has its maps channels-last, so that it draws channel after channel of each pixel.
    """

    def __init__(self, example: Tensor, channels_last: bool = False):
        super().__init__()
        self.example = example
        self.channels_last = channels_last

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and not kwargs.keys() - {"dtype", "device", "requires_grad"}:
            size = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            return self.example.new_empty(size, **{**kwargs, "dtype": dtype})  # which can be filled for each device
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func is F.alpha_dropout:
            return self._alpha_dropout(*args, **kwargs)
        if func in (torch.empty_like, torch.rand_like, torch.randn_like):
            return func(self._layout(args[0]), *args[1:], **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """As torch computes it for one device; its rule for `vmap` fills the mask in another order."""
        if not training or p in (0, 1) or input.numel() == 0:
            return F.dropout(input, p, training, inplace)
        mask = torch.empty_like(self._layout(input)).bernoulli_(1 - p).div_(1 - p)
        return input.mul_(mask) if inplace else input * mask

    def _alpha_dropout(self, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
        """As `_dropout`; dropped units get the value that keeps mean and variance (Klambauer et al., 2017)."""
        if not training or p in (0, 1) or input.numel() == 0:
            return F.alpha_dropout(input, p, training, inplace)
        alpha = 1.7580993408473766
        scale = 1 / math.sqrt((alpha**2 * p + 1) * (1 - p))
        kept = torch.empty_like(self._layout(input)).bernoulli_(1 - p)
        shift = (kept - 1) * (alpha * scale) + alpha * scale * p
        dropped = input * (kept * scale) + shift
        return input.copy_(dropped) if inplace else dropped

    def _layout(self, like: Tensor) -> Tensor:
        """A tensor with the layout that this one has when the device is alone."""
        if not self.channels_last or like.dim() != 4:
            return like
        batch, channels, height, width = like.shape
        return like.new_empty(batch, height, width, channels).movedim(-1, 1)


class DrawingLayer(nn.Module):
    """A layer that draws random numbers: for a block of devices, while `randomness` is set.

    If it draws numbers of its own shape, such as one for each example, it can run `apart` in a folded block: by `vmap`,
    on the devices' parts of its input. That needs a layer without weights.
    """

    plain_name: str
    apart = False
    randomness: DeviceRandomness | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        randomness = self.randomness
        if randomness is not None and self.apart and randomness.axis == 1 and len(args) == 1 and not kwargs:
            return self._run_apart(randomness, *args)
        if randomness is None or randomness.is_drawing:
            return super().forward(*args, **kwargs)
        with randomness.draw(args):
            return super().forward(*args, **kwargs)

    def _run_apart(self, randomness: DeviceRandomness, x: Tensor) -> Any:
        forward = super().forward

        def run(own: Tensor) -> Any:
            with randomness.draw(own):
                return forward(own)

        parts: Tensor = x.unflatten(1, (len(randomness.generators), -1))
        with randomness.inside_vmap():
            return vmap(run, in_dims=1, out_dims=1, randomness="different")(parts).flatten(1, 2)


def find_drawing_layers(module: nn.Module, drawing: Collection[str], apart: Collection[str] = ()) -> list[DrawingLayer]:
    """Make the layers of some classes `DrawingLayer`s, in place, and return them.

    Parameters
    ----------
    module : the module.
    drawing : the names of the classes of layers that draw random numbers.
    apart : those that run apart from the rest of a folded block.
    """
    for layer in module.modules():
        if class_name(layer) in drawing:
            layer.__class__ = _drawing_class(type(layer), class_name(layer))  # type: ignore[arg-type]
    found = [layer for layer in module.modules() if isinstance(layer, DrawingLayer)]
    for layer in found:
        layer.apart = layer.plain_name in apart
    return found


def class_name(layer: nn.Module) -> str:
    """The full name of its class. A class that is made anew for every module keeps its name."""
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


@lru_cache(maxsize=256)
def _drawing_class(plain: type[nn.Module], name: str) -> type[nn.Module]:
    return type(plain.__name__, (DrawingLayer, plain), {"plain_name": name})


@contextmanager
def drawing_with(layers: Sequence[DrawingLayer], randomness: DeviceRandomness | None) -> Iterator[None]:
    """Let these layers draw for a block of devices; raises if anything else draws meanwhile.

    Parameters
    ----------
    layers : the layers.
    randomness : what they draw from; None: nothing is drawn.
    """
    if randomness is None:
        yield
        return
    before = torch.get_rng_state()
    for layer in layers:
        layer.randomness = randomness
    try:
        yield
    finally:
        for layer in layers:
            layer.randomness = None
        unknown = not torch.equal(torch.get_rng_state(), before)
        torch.set_rng_state(before)
    if unknown:
        raise CannotDrawError("an operation of an unknown layer")


class DrawRecorder(DispatchMode):
    """Calls a function at every operation that may draw random numbers."""

    def __init__(self, found: Callable[[], None]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_random(func):
            self.found()
        return func(*args, **(kwargs or {}))


@lru_cache(maxsize=4096)
def is_random(operation: Any) -> bool:
    """True if torch says that an operation draws from a generator."""
    return torch.Tag.nondeterministic_seeded in operation.tags


def name_of(operation: Any) -> str:
    """The name that its users know: torch.rand for aten.rand.default."""
    name = str(operation).split(".")[1]
    return f"{name}()" if name.endswith("_") else f"torch.{name}"


def _as_alone(parts: Tensor) -> Tensor:
    """A tensor like `parts` where each device's part lies in memory as it does when the device is alone.

    How torch fills a tensor depends on its layout: channels-last tensors are filled in another order.
    """
    if parts.is_contiguous():
        return parts
    order = sorted(range(1, parts.dim()), key=parts.stride, reverse=True)
    dense = parts.new_empty([len(parts), *(parts.shape[axis] for axis in order)])
    return dense.permute(0, *(1 + order.index(axis) for axis in range(1, parts.dim())))
