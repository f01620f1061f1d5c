"""Tasks: the part of a method that runs on devices, with a declaration of all it uploads.

The declaration (`sends`) is the only schema that admission checks need.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import torch

from ..models import Model
from ..seeds import TRAIN
from ..tensors import Parcel
from .client import Client, ClientResult
from .plan import Schedule

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Tensor name -> shape and dtype."""

BundleSpec = Callable[[Model, Parcel, int], Layout]
"""(the device's model, its inbox, its number of examples) -> the layout of an uploaded bundle."""

UploadSpecs = Mapping[str, BundleSpec | str]
"""Bundle name -> its specification, or the name of the method's function that is one."""


class Bounded(tuple[tuple[int, ...], torch.dtype]):
    """Shape and dtype of integers in [0, below), such as class labels.

    Parameters
    ----------
    shape : the shape.
    dtype : the dtype.
    below : values are smaller than this; the gate refuses others.
    """

    below: int

    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, below: int) -> "Bounded":
        spec = super().__new__(cls, (shape, dtype))
        spec.below = below
        return spec


@dataclass(frozen=True)
class Like:
    """A bundle with the same layout as one of the inbox, of which it is an update.

    Parameters
    ----------
    bundle : the name of the bundle in the inbox.
    same_entries : whether its entries are the same weights of the global model in every round.
    """

    bundle: str
    same_entries: bool = True

    def __call__(self, model: Model, inbox: Parcel, examples: int) -> Layout:
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in inbox[self.bundle].items()}


def like(bundle: str, same_entries: bool = True) -> BundleSpec:
    """Declare a bundle with the same layout as one of the inbox, of which it is an update.

    Compression sends the difference from what the device received, so where a device has nothing new, upload what it
    received, not zeros.

    Parameters
    ----------
    bundle : the name of the bundle in the inbox.
    same_entries : whether its entries are the same weights of the global model in every round. If not, compression
        keeps nothing of what it left out: added to the next upload, it would change other weights.

    Examples
    --------
    >>> @on_device(sends={"weights": like("weights")})
    ... def train(self, client: Client, inbox: Parcel) -> ClientResult: ...
    """
    return Like(bundle, same_entries)


def shaped(**layout: tuple[tuple[int | Literal["classes", "examples"], ...], torch.dtype]) -> BundleSpec:
    """Declare a bundle by the shapes and dtypes of its tensors.

    Parameters
    ----------
    layout : shape and dtype of each tensor, by name. An axis may be as long as there are "classes", or "examples" on
        the device. The axis K is left out.

    Examples
    --------
    >>> shaped(prototypes=(("classes", 64), torch.float32), counts=(("classes",), torch.int64))
    """

    def spec(model: Model, inbox: Parcel, examples: int) -> Layout:
        known = {"classes": model.classes, "examples": examples}
        return {
            name: (tuple(known[size] if isinstance(size, str) else size for size in sizes), dtype)
            for name, (sizes, dtype) in layout.items()
        }

    return spec


@dataclass(frozen=True)
class MethodRun:
    """A method's function as what a task runs, so that methods that differ only in numbers can run it together.

    Parameters
    ----------
    function : (method, client, inbox) -> result.
    method : the method. Its attribute `per_device`, if it has one, names settings that may be a number for each device,
        [K], instead of one for all.
    """

    function: Callable[..., ClientResult]
    method: Any

    def __call__(self, client: Client, inbox: Parcel) -> ClientResult:
        return self.function(self.method, client, inbox)

    def joining_key(self) -> Hashable:
        """Runs of equal key can be joined: their methods are equal but for numbers that may differ between devices."""
        names = getattr(self.method, "per_device", ())
        # a strength of 0 may stand for not computed at all, so it differs from any other
        alike = {name: float(bool(getattr(self.method, name))) for name in names}
        return self.function, replace(self.method, **alike) if alike else self.method


def join_tasks(tasks: Sequence["Task"]) -> "Task":
    """The task of a block. If the methods of its devices differ in numbers, it runs with those of each device.

    Parameters
    ----------
    tasks : the task of each device, of one `joining_key`.
    """
    first, runs = tasks[0], [task.run for task in tasks if isinstance(task.run, MethodRun)]
    methods = [run.method for run in runs]
    if len(runs) < len(tasks) or all(method == methods[0] for method in methods):
        return first
    columns = {name: [getattr(method, name) for method in methods] for name in methods[0].per_device}
    unequal = {name: torch.tensor(own, dtype=torch.get_default_dtype()) for name, own in columns.items()}
    return replace(first, run=MethodRun(runs[0].function, replace(methods[0], **unequal)))


@dataclass(frozen=True)
class Task:
    """A function that devices run: (client, inbox) -> result. `on_device` makes one.

    Parameters
    ----------
    name : the name of the task.
    run : the function.
    sends : the layout of each uploaded bundle.
    stream : the random stream of the batches; two requests never draw the same, even with one stream.
    schedule : batch size and epochs; None: the recipe's.
    ref : how another process looks the task up; (): by its name, in the method.
    batch_key : tasks with equal keys may share a block, across experiments too; None: with no other.
    host_bundles : bundles of the inbox whose values the task reads, such as sizes: they stay on the CPU.
    """

    name: str
    run: Callable[[Client, Parcel], ClientResult]
    sends: Mapping[str, BundleSpec]
    stream: str = TRAIN
    schedule: Schedule | None = None
    ref: tuple[str, ...] = ()
    batch_key: Hashable = None
    host_bundles: tuple[str, ...] = ()

    @property
    def joining_key(self) -> Hashable:
        """Tasks with equal keys may share a block if each device gets the numbers of its own method (`join_tasks`)."""
        run = self.run
        return run.joining_key() if self.batch_key is not None and isinstance(run, MethodRun) else self.batch_key

    def without_upload(self, *ref: str) -> "Task":
        """The same training on the same batches, but nothing is uploaded.

        Parameters
        ----------
        ref : how another process looks this task up.
        """

        def run(client: Client, inbox: Parcel) -> ClientResult:
            return replace(self.run(client, inbox), upload={})

        batch_key = self.batch_key and ("without upload", self.batch_key)
        return replace(self, run=run, sends={}, ref=ref, batch_key=batch_key)


class OnDevice:
    """A descriptor: accessed on an instance of its class, the decorated function is a `Task`."""

    def __init__(
        self,
        function: Callable[..., ClientResult],
        sends: UploadSpecs,
        stream: str,
        batch_across_runs: bool,
        takes_method: bool,
        host_bundles: tuple[str, ...] = (),
    ):
        self.function, self.sends, self.stream = function, sends, stream
        self.batch_across_runs, self.takes_method = batch_across_runs, takes_method
        self.host_bundles = host_bundles
        self.name = function.__name__
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name  # by which a worker looks it up

    @overload
    def __get__(self, instance: None, owner: type) -> "OnDevice": ...
    @overload
    def __get__(self, instance: object, owner: type) -> Task: ...
    def __get__(self, instance: object | None, owner: type) -> "OnDevice | Task":
        if instance is None:
            return self
        function = self.function
        sends = {
            bundle: getattr(instance, spec) if isinstance(spec, str) else spec for bundle, spec in self.sends.items()
        }
        if not self.takes_method:
            return Task(self.name, function, sends, self.stream, batch_key=function, host_bundles=self.host_bundles)
        batch_key = (function, instance) if self.batch_across_runs and _is_hashable(instance) else None
        run = MethodRun(function, instance)
        return Task(self.name, run, sends, self.stream, batch_key=batch_key, host_bundles=self.host_bundles)


def tasks_of(method: object) -> list[Task]:
    """The tasks that a method declares with `on_device`.

    Parameters
    ----------
    method : the method.
    """
    names = [name for kind in type(method).__mro__ for name, one in vars(kind).items() if isinstance(one, OnDevice)]
    found = (getattr(method, name) for name in dict.fromkeys(names))
    return [task for task in found if isinstance(task, Task)]


def _is_hashable(instance: object) -> bool:
    try:
        hash(instance)
    except TypeError:  # a setting that is a dictionary, for example
        return False
    return True


def on_device(
    sends: UploadSpecs, stream: str = TRAIN, batch_across_runs: bool = True, host_bundles: tuple[str, ...] = ()
) -> Callable[[Callable[[Any, Client, Parcel], ClientResult]], OnDevice]:
    """Turn a method's function `(self, client, inbox) -> ClientResult` into a task.

    Parameters
    ----------
    sends : a specification of every uploaded bundle, by name: `like`, `shaped`, or the name of a method `(model, inbox,
        examples) -> {name: (shape, dtype)}`. It describes one device: neither the shapes nor the inbox have the axis K.
        The gate refuses everything else.
    stream : the random stream of the batches.
    batch_across_runs : whether devices of several experiments may share a block. Not if the task draws once for a whole
        block, or feeds the model anything but its batches, since it is unknown whether results are then bit-identical
        in every block.
    host_bundles : bundles of the inbox whose values the task reads, such as sizes. They stay on the CPU when all else
        is on an accelerator, where reading a value would wait for everything before it.

    Examples
    --------
    >>> @on_device(sends={"weights": like("weights")})
    ... def train(self, client: Client, inbox: Parcel) -> ClientResult:
    ...     return ClientResult(upload={"weights": fit(client, inbox["weights"], label_loss(client))})
    """
    return lambda function: OnDevice(function, sends, stream, batch_across_runs, True, host_bundles)


def on_any_device(sends: UploadSpecs) -> Callable[[Callable[[Client, Parcel], ClientResult]], OnDevice]:
    """`on_device` for a function `(client, inbox) -> ClientResult` that several methods share.

    Parameters
    ----------
    sends : a specification of every uploaded bundle, by name.
    """
    return lambda function: OnDevice(function, sends, TRAIN, batch_across_runs=True, takes_method=False)
