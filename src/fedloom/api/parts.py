"""The parts that a simulation is composed of, and their translation into a recipe.

Where a recipe takes a name, Python takes a name or an object. An object that no registry knows gets a name of its own,
known to this simulation alone, so that every simulation is a recipe and is checked as one.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal

from torch import nn

from ..client import LOSSES
from ..data import Dataset, LearningTask
from ..data.adapters import as_dataset
from ..evaluation.metrics import as_metric
from ..methods import Method
from ..recipe.registries import KINDS, Registries
from ..registry import Choice, Entry, Layered, dataclass_settings, find_name, freeze, settable_parameters
from ..settings import FrozenDict

__all__ = ["ClientConfig", "Tiers", "tiers"]
Named = str | Entry | Choice | Mapping[str, Any] | Callable[..., Any] | object
"""A name, a name with settings, or an object."""


@dataclass(frozen=True)
class ClientConfig:
    """How devices train: what a recipe calls `training`.

    Parameters
    ----------
    epochs : passes over a device's examples per round.
    batch_size : examples per step.
    optimizer : a name, `optimizers.sgd(lr=0.1)`, or an optimizer of your own.
    lr_schedule : the same for the learning rate by round.
    last_batch : "keep", "drop" or "wrap" (fill it up from the beginning) a last batch that is too small.
    shuffle : whether examples are visited in a random order, a new one in every epoch; else as the device has them.
    loss : a name, `losses.focal(gamma=2)`, or a function `(logits, labels)` with one number per example. Default: that
        of the task.

    Examples
    --------
    >>> fl.ClientConfig(epochs=2, optimizer=fl.optimizers.adam(lr=0.001))
    """

    epochs: int = 1
    batch_size: int = 10
    optimizer: Any = "sgd"
    lr_schedule: Any = "constant"
    last_batch: Literal["keep", "drop", "wrap"] = "keep"
    shuffle: bool = True
    loss: Any = None

    def __post_init__(self) -> None:
        for one in fields(self):
            object.__setattr__(self, one.name, freeze(getattr(self, one.name)))  # hashable


@dataclass(frozen=True)
class Tiers:
    """Device classes and their models, from `tiers`.

    Parameters
    ----------
    model : the model family of all tiers; None: the default, or each tier's own.
    settings : settings of the family for all tiers.
    tiers : the size of each tier, by name.
    """

    model: Any
    settings: FrozenDict
    tiers: FrozenDict

    def __repr__(self) -> str:
        model = [] if self.model is None else [str(getattr(self.model, "__name__", self.model))]
        settings = [repr(dict(self.settings))] if self.settings else []
        sizes = [f"{name}={dict(size)}" for name, size in self.tiers.items()]
        return f"tiers({', '.join([*model, *settings, *sizes])})"


def tiers(model: Any = None, settings: Mapping[str, Any] | None = None, /, **sizes: Mapping[str, Any]) -> Tiers:
    """Device classes: the share of devices in each, and the size of its model.

    Parameters
    ----------
    model : the model family of all tiers: a name, a family of `fedloom.models`, or your own function
        `(input_shape, classes, **settings) -> nn.Module`. A tier may name its own with the key `model`.
    settings : settings of the family for all tiers.
    **sizes : for each tier its `share` of the devices, the family's settings in which it differs, and optionally its
        `speed` (multiply-adds per second) and `bandwidth` (bytes per second).

    Returns
    -------
    Tiers
        For `Simulation(tiers=…)`.

    Examples
    --------
    >>> fl.tiers(fl.models.convnet, large=dict(share=0.3), small=dict(share=0.7, width=0.25))
    """
    if not sizes:
        raise TypeError("tiers needs at least one tier: tiers(models.convnet, all=dict(share=1.0))")
    for name, size in sizes.items():
        if not isinstance(size, Mapping):
            raise TypeError(f"the tier {name!r} is a mapping such as dict(share=0.5, width=0.25), not {size!r}")
    return Tiers(freeze(model), freeze(settings or {}), freeze(sizes))


NEEDED = {
    "optimizers": ("start", "step"),
    "lr_schedules": ("factor",),
    "aggregation": ("aggregate",),
    "server_optimizers": ("start", "move"),
    "compressors": ("parts", "encode", "decode"),
    "losses": ("__call__",),
}
"""Methods that an object of a kind must have. Entries of these kinds build one; of other kinds, they are called."""

COMPUTED = tuple(LOSSES.passed)  # arguments of a function that is a loss itself


class Composer:
    """Collects the names of a simulation's own objects while its parts are translated."""

    def __init__(self, registries: Registries):
        self.registries = registries
        self.added: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}

    @property
    def result(self) -> Registries:
        return self.registries.with_names(**self.added)

    def known(self, kind: str) -> Mapping[str, Any]:
        """The names so far."""
        return Layered(self.added[kind], getattr(self.registries, kind))

    def choose(self, kind: str, value: Any, key: str = "kind") -> dict[str, Any]:
        """The table that a recipe has for this value: a name under `key`, and settings."""
        if isinstance(value, str):
            return {key: value}
        if isinstance(value, Choice | Entry):
            if value.kind != kind:
                raise TypeError(f"{value!r} is one of the {value.kind}, where one of the {kind} is needed")
            return {key: self._name_of_entry(kind, value), **(value.settings if isinstance(value, Choice) else {})}
        if isinstance(value, Mapping):
            chosen = value.get(key)
            return dict(value) if isinstance(chosen, str | None) else {**value, **self.choose(kind, chosen, key)}
        if isinstance(value, partial):
            if value.args:
                raise TypeError(f"{value!r}: settings must be passed by name")
            return {**self.choose(kind, value.func, key), **value.keywords}
        name = find_name(self.known(kind), value)
        if name is not None:
            return {key: name}
        _check_kind(kind, value)
        if is_dataclass(value) and not isinstance(value, type) and _is_plain(dataclass_settings(value)):
            return {key: self.add(kind, type(value)), **dataclass_settings(value)}
        return {key: self.add(kind, value)}

    def _name_of_entry(self, kind: str, value: "Choice | Entry") -> str:
        """An entry may be one that was registered after these tables were made."""
        if isinstance(value, Entry) and value.name not in self.known(kind):
            self.added[kind][value.name] = value.target
        return value.name

    def add(self, kind: str, value: Any, stem: str | None = None) -> str:
        """The name of an object, which gets one of its own if it has none.

        An instance is wrapped in a function that returns it, where entries build one.
        """
        known = self.known(kind)
        found = find_name(known, value)
        if found is not None:
            return found
        stem = stem or _stem(value)
        name = next(one for one in chain([stem], (f"{stem}_{n}" for n in count(2))) if one not in known)
        is_factory = kind not in NEEDED or inspect.isclass(value) or (inspect.isroutine(value) and not _is_loss(value))
        self.added[kind][name] = value if is_factory else _Returning(value)
        return name

    def dataset(self, value: Any, task: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The recipe's keys for a data set: a name and options, or data that is at hand and what is learned from it."""
        if isinstance(value, str | Choice | Entry) or (callable(value) and not isinstance(value, Dataset)):
            table = self.choose("datasets", value, key="dataset")
            folder = table.pop("folder", None)
            if folder is None:
                return table
            name = table.pop("dataset")
            read = partial(self.known("datasets")[name], folder=Path(folder), **table)
            return {"dataset": self.add("datasets", _Calling(read), stem=name)}
        learned = self.known("tasks")[task["kind"]] if task else None
        data = value if isinstance(value, Dataset) else as_dataset(value, task=learned)
        return {"dataset": self.add("datasets", _Returning(data), stem=data.name)}

    def metric(self, value: Any) -> dict[str, Any]:
        """A name, `metrics.f1()`, a `Metric`, or a function of logits and labels."""
        if isinstance(value, str | Choice | Entry | Mapping) or find_name(self.registries.metrics, value):
            return self.choose("metrics", value)
        metric = as_metric(value)
        known = self.known("metrics")
        if metric.name in known and known[metric.name] != metric:
            raise ValueError(
                f"there is already another metric {metric.name!r}; give yours a name of its own: "
                f"Metric({metric.name + '_2'!r}, function)"
            )
        self.added["metrics"][metric.name] = metric
        return {"kind": metric.name}

    def evaluation(self, value: Mapping[str, Any]) -> dict[str, Any]:
        evaluation = dict(value)
        metrics = evaluation.get("metrics")
        if metrics is not None:
            listed = metrics if isinstance(metrics, list | tuple) else [metrics]
            evaluation["metrics"] = [self.metric(metric) for metric in listed]
        return evaluation

    def method(self, value: Any) -> dict[str, Any]:
        if inspect.ismodule(value):
            name = value.__name__.rpartition(".")[2]
            raise TypeError(f"methods.{name} is a module; take the class in it, such as methods.FedAvg(), or {name!r}")
        if isinstance(value, str | Choice | Entry | Mapping):
            return self.choose("methods", value, key="name")
        kind = value if inspect.isclass(value) else type(value)
        if Method not in kind.__mro__:
            raise TypeError(f"{value!r} is not a method: a subclass of fedloom.methods.Method, or its name")
        if inspect.isclass(value):
            return {"name": self.add("methods", value)}
        for part in getattr(value, "parts", ()):  # of a method that is composed of others
            self.add("methods", type(part.method))
        settings = value.to_settings(self.known("methods"))
        unset = [name for name, setting in settings.items() if setting is None]
        if unset:
            raise TypeError(f"{unset[0]}=None cannot be written into a recipe; make None its default")
        return {"name": self.add("methods", kind), **settings}

    def tiers(self, value: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The recipe's `model` and `tiers`."""
        if isinstance(value, Mapping):
            value = tiers(None, None, **value)
        if not isinstance(value, Tiers):
            raise TypeError(f"{value!r}: tiers come from fedloom.tiers(…), or are a mapping from names to sizes")
        model = {} if value.model is None else self.choose("models", value.model, key="family")
        listed = []
        for name, size in value.tiers.items():
            size = dict(size)
            own = {} if "model" not in size else self.choose("models", size.pop("model"), key="family")
            listed.append({"name": name, **own, **size})
        return {**model, **value.settings}, listed

    def training(self, client: "ClientConfig | Mapping[str, Any]") -> dict[str, Any]:
        if not isinstance(client, ClientConfig | Mapping):
            raise TypeError(f"client is a ClientConfig, or a mapping with its fields, not {client!r}")
        if isinstance(client, ClientConfig):
            client = {one.name: getattr(client, one.name) for one in fields(client)}
        values = dict(client)
        for key, kind in (("optimizer", "optimizers"), ("lr_schedule", "lr_schedules"), ("loss", "losses")):
            if values.get(key) is not None:
                values[key] = self.choose(kind, values[key])
        return {key: value for key, value in values.items() if value is not None}

    def task(self, value: Any) -> dict[str, Any]:
        """A name, `tasks.regression`, or a `LearningTask`."""
        if isinstance(value, LearningTask) and find_name(self.known("tasks"), value) is None:
            return {"kind": self.add("tasks", value, stem=value.kind)}
        return self.choose("tasks", value)

    def compression(self, value: Any) -> dict[str, Any]:
        """A mapping with `uplink` and `downlink`, or a compressor for the uplink."""
        links = value if isinstance(value, Mapping) and "kind" not in value else {"uplink": value}
        return {link: self.choose("compressors", one) for link, one in links.items() if one is not None}

    def aggregation(self, value: Any) -> dict[str, Any]:
        """A rule, or a mapping with `rule`, its settings and `server_optimizer`."""
        aggregation = self.choose("aggregation", value, key="rule")
        if aggregation.get("server_optimizer") is not None:
            aggregation["server_optimizer"] = self.choose("server_optimizers", aggregation["server_optimizer"])
        return aggregation

    def faults(self, value: Mapping[str, Any]) -> dict[str, Any]:
        faults = dict(value)
        if faults.get("stragglers") is not None:
            faults["stragglers"] = self.choose("stragglers", faults["stragglers"])
        return faults

    def engine(self, value: Any) -> dict[str, Any]:
        return self.choose("engines", value)


@dataclass(frozen=True)
class _Returning:
    """A function without settings that returns an object."""

    value: Any

    def __call__(self) -> Any:
        return self.value


@dataclass(frozen=True)
class _Calling:
    """A function without settings that calls another."""

    function: Callable[[], Any]

    def __call__(self) -> Any:
        return self.function()


def is_same_entry(one: Any, other: Any) -> bool:
    """True if two entries of a registry are equal; data sets are if they hold the same examples."""
    if one is other or one == other:
        return True
    values = [entry.value for entry in (one, other) if isinstance(entry, _Returning)]
    datasets = [value for value in values if isinstance(value, Dataset)]
    return len(datasets) == 2 and datasets[0].fingerprint() == datasets[1].fingerprint()


def _stem(value: Any) -> str:
    """The name of a function or a class, in lower case for classes as the built-in names are; of an object, its
    class's."""
    kind = value if inspect.isclass(value) or inspect.isroutine(value) else type(value)
    name: str = kind.__name__.strip("<>")
    return name.lower() if inspect.isclass(kind) else name


def _check_kind(kind: str, value: Any) -> None:
    """Raise unless an object can be one of the kind, or builds one."""
    needed, article = NEEDED.get(kind), f"one of the {kind}"
    if needed is None:
        if not callable(value):
            raise TypeError(f"{value!r} cannot be {article}: it is neither a name nor a function")
        if kind == "models" and isinstance(value, nn.Module):
            raise TypeError(f"{type(value).__name__} is a finished module; pass its class or a function that builds it")
        return
    if inspect.isroutine(value):
        required = _required(value)
        if required and kind != "losses":
            raise TypeError(
                f"{value.__name__} cannot be {article}: it needs {', '.join(required)}. Pass an object with the "
                f"methods {', '.join(needed)}, its class, or a function without arguments that returns it"
            )
        return
    lacking = [name for name in needed if not hasattr(value, name)]
    if lacking:
        raise TypeError(f"{value!r} cannot be {article}: it has no method {', '.join(lacking)}")


def _required(function: Any) -> list[str]:
    """The arguments that a function needs; functions in C do not tell."""
    try:
        return [name for name, p in settable_parameters(function).items() if p.default is p.empty]
    except ValueError:
        return ["arguments"]


def _is_loss(function: Any) -> bool:
    """True for a function of logits and labels that calls them otherwise, as torch's do."""
    required = _required(function)
    return len(required) == 2 and tuple(required) != COMPUTED


def _is_plain(settings: Any) -> bool:
    """True if a recipe can hold the settings."""
    if isinstance(settings, Mapping):
        return all(isinstance(key, str) and _is_plain(value) for key, value in settings.items())
    if isinstance(settings, list | tuple):
        return all(_is_plain(value) for value in settings)
    return isinstance(settings, bool | int | float | str)
