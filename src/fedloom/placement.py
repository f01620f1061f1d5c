"""Where tensors are computed: one way onto a torch device and one way back.

Everything that a block of devices needs crosses in one copy, and everything that it returns in another. What lasts
longer than a block, such as the data set, crosses once per process. Server state and aggregation stay on the CPU.
"""

import gc
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Precision = Literal["float32", "bfloat16", "float16"]
"""What models compute in. Weights, losses and optimizers stay in float32 (torch's autocast)."""

CPU = torch.device("cpu")
ALIGNMENT = 64  # bytes: kernels read whole vectors, and sums must not depend on where a tensor begins
KNOWN_DEVICES = ("cuda", "mps", "xpu")  # in the order in which "auto" looks for them

TreeT = TypeVar("TreeT")

_residents = WeakTensorKeyDictionary()  # tensor -> {device: the same there}


@dataclass(frozen=True)
class Compute:
    """Where and how the devices of a block are computed.

    Parameters
    ----------
    device : a torch device, such as "cpu", "cuda" or "cuda:1".
    precision : what models compute in.
    compile : whether models are compiled by `torch.compile`.
    tf32 : whether matrix products of float32 may round their factors to TF32, on hardware that has it.
    deterministic : whether only deterministic algorithms are used; an operation that has none then raises.
    devices : one torch device for each worker process; (): one process uses `device`.
    """

    device: str = "cpu"
    precision: Precision = "float32"
    compile: bool = False
    tf32: bool = False
    deterministic: bool = False
    devices: tuple[str, ...] = ()
    is_cpu: bool = field(init=False, compare=False, default=True)
    """True if nothing has to be moved."""
    is_plain: bool = field(init=False, compare=False, default=True)
    """True if models compute as torch does by default."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_cpu", self.device.partition(":")[0] == "cpu")
        object.__setattr__(self, "is_plain", self.precision == "float32" and not self.compile)

    @property
    def torch_device(self) -> torch.device:
        """The device, as torch has it."""
        return torch.device(self.device)

    @property
    def repeats_bits(self) -> bool:
        """True if the same recipe gives the same bits again, on the same hardware and version of torch."""
        return self.is_cpu or self.deterministic

    def for_worker(self, index: int) -> "Compute":
        """The same on the device of one worker process.

        Parameters
        ----------
        index : the number of the worker, from 0.
        """
        return replace(self, device=self.devices[index % len(self.devices)]) if self.devices else self

    def synchronize(self) -> None:
        """Wait until everything that was asked of the device is done."""
        wait = getattr(getattr(torch, self.torch_device.type, None), "synchronize", None)
        if not self.is_cpu and callable(wait):
            wait()

    def release_memory(self) -> None:
        """Return memory that torch keeps for later to the device."""
        gc.collect()  # an error's traceback may hold tensors
        release = getattr(getattr(torch, self.torch_device.type, None), "empty_cache", None)
        if callable(release):
            release()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Torch's own settings while a block is computed; those of the caller are restored."""
        if self.is_cpu:
            yield
            return
        with ExitStack() as stack:
            # one thread uses one device: torch's own threads for other devices could not be forked
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if self.torch_device.type == "cuda":
                stack.enter_context(_cuda_rounding(self.tf32))
            if self.deterministic:
                stack.enter_context(_deterministic_algorithms())
            yield


ON_CPU = Compute()


def find_devices() -> list[str]:
    """What torch finds besides the CPU: "cuda:0", "cuda:1", "mps", … Nothing is initialized by asking."""
    found = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    xpu = getattr(torch, "xpu", None)
    found += [f"xpu:{index}" for index in range(xpu.device_count() if xpu else 0)]
    return found


def resolve_device(name: str) -> str:
    """The device that a recipe means: "auto" is the first accelerator that torch finds, or else the CPU.

    Parameters
    ----------
    name : "auto" or the name of a torch device.

    Raises
    ------
    ValueError
        If torch does not know the device, or does not find it on this machine.
    """
    if name == "auto":
        kinds = [found.partition(":")[0] for found in find_devices()]
        return next((kind for kind in KNOWN_DEVICES if kind in kinds), "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"torch knows no device {name!r}") from None
    if device.type in ("cpu", "meta"):
        if name != "cpu":
            raise ValueError(f"{name!r} computes nothing here" if device.type == "meta" else "the CPU is only 'cpu'")
        return name
    count = count_devices(device.type)
    if (device.index or 0) >= count:
        found = ", ".join(find_devices()) or "only the CPU"
        raise ValueError(f"torch does not find {name!r} on this machine; it finds {found}")
    return name


def hardware_name(device: torch.device) -> str:
    """What the maker of a device calls it, as far as torch knows.

    Parameters
    ----------
    device : the device.
    """
    if device.type == "cpu":
        return platform.processor() or platform.machine()
    name = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return str(name(device)) if callable(name) else device.type


def count_devices(kind: str) -> int:
    """How many devices of a kind torch finds.

    Parameters
    ----------
    kind : "cuda", "mps", "xpu", or the name of a backend of your own.
    """
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    module = getattr(torch, kind, None)
    counter = getattr(module, "device_count", None)
    return int(counter()) if callable(counter) else 0


def resident(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device. It is moved once per process, and stays there while the original exists.

    Parameters
    ----------
    tensor : the tensor, which must not change.
    device : the device.
    """
    if tensor.device == device or (device.index is None and tensor.device.type == device.type):
        return tensor
    known: dict[torch.device, Tensor] = _residents.setdefault(tensor, {})
    if device not in known:
        with torch.inference_mode(False):  # it may outlive the caller's context
            known[device] = tensor.to(device)
    return known[device]


def enter(tree: TreeT, device: torch.device) -> TreeT:
    """Everything in a tree of mappings, sequences and dataclasses on a device: all tensors cross in one copy.

    A tensor that is the same for all devices of a block (expanded along its first axis) crosses once and is expanded
    there.

    Parameters
    ----------
    tree : what holds the tensors.
    device : the device.
    """
    if device.type == "cpu":
        return tree
    tensors = _tensors_of(tree)
    moved = iter(_cross(tensors, lambda buffer: _upload(buffer, device)))
    return cast(TreeT, _map_tensors(lambda _: next(moved), tree))


def leave(tree: TreeT) -> TreeT:
    """The same on the CPU again: all tensors that are elsewhere cross in one copy.

    Parameters
    ----------
    tree : what holds the tensors.
    """
    away = [tensor for tensor in _tensors_of(tree) if not tensor.is_cpu]
    moved = iter(_cross(away, _download))
    return cast(TreeT, _map_tensors(lambda tensor: tensor if tensor.is_cpu else next(moved), tree))


def _cross(tensors: Sequence[Tensor], move: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Pack tensors into one buffer of bytes, move it, and unpack it."""
    if not tensors:
        return []
    rows = [tensor[:1] if _is_expanded(tensor) else tensor for tensor in tensors]
    pieces, starts, end = list[Tensor](), list[int](), 0
    for row in rows:
        flat = row.detach().contiguous().reshape(-1)
        if flat.stride() != (1,):  # a single entry counts as contiguous with any stride
            flat = flat.clone(memory_format=torch.contiguous_format)
        flat = flat.view(torch.uint8)
        gap = -end % ALIGNMENT
        if gap:
            pieces.append(flat.new_zeros(gap))
        starts.append(end + gap)
        pieces.append(flat)
        end += gap + len(flat)
    buffer = move(torch.cat(pieces))
    unpacked = []
    for tensor, row, start in zip(tensors, rows, starts, strict=True):
        size = row.numel() * row.element_size()
        whole = buffer[start : start + size].view(row.dtype).view(row.shape)
        unpacked.append(whole.expand(tensor.shape) if _is_expanded(tensor) else whole)
    return unpacked


def _is_expanded(tensor: Tensor) -> bool:
    return tensor.dim() > 0 and len(tensor) > 1 and tensor.stride(0) == 0


def _upload(buffer: Tensor, device: torch.device) -> Tensor:
    if device.type in ("cuda", "xpu") and not buffer.is_pinned():
        return buffer.pin_memory().to(device, non_blocking=True)
    return buffer.to(device)


def _download(buffer: Tensor) -> Tensor:
    if buffer.device.type not in ("cuda", "xpu"):
        return buffer.cpu()
    pinned = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)
    pinned.copy_(buffer, non_blocking=True)
    getattr(torch, buffer.device.type).current_stream(buffer.device).synchronize()
    return pinned


def _tensors_of(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _map_tensors(note, tree)
    return found


def _map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same tree with other tensors; parts without tensors are kept as they are."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: _map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(_map_tensors(function, value) for value in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        values = {one.name: getattr(tree, one.name) for one in fields(tree) if one.init}
        made = {name: _map_tensors(function, value) for name, value in values.items()}
        changed = {name: value for name, value in made.items() if value is not values[name]}
        return replace(tree, **changed) if changed else tree
    return tree


@contextmanager
def _cuda_rounding(tf32: bool) -> Iterator[None]:
    """Whether CUDA may use TF32 for products and convolutions of float32."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses to be deterministic
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
