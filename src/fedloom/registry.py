"""Open tables of names: everything that a recipe names is looked up in one of them.

A name is built in, registered from Python, or added by an installed package through an entry point.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property, partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, overload

from .settings import FrozenDict

T = TypeVar("T")
D = TypeVar("D")


class EntryPointError(Exception):
    """A name that an installed package adds, but whose code cannot be imported.

    Parameters
    ----------
    kind : the registry, such as "optimizers".
    point : the entry point.
    cause : what importing it raised.
    """

    def __init__(self, kind: str, point: EntryPoint, cause: Exception):
        package = f" of the package {point.dist.name}" if point.dist else ""
        super().__init__(f"{kind}.{point.name}{package} cannot be imported: {type(cause).__name__}: {cause}")
        self.hint = f"its entry point is {point.value}: repair or uninstall the package"


@dataclass(frozen=True)
class Choice:
    """An entry of a registry with settings of its own, such as `optimizers.sgd(lr=0.1)`.

    It is what a recipe writes as a name and its settings: frozen, hashable, and nothing is built or read yet.

    Parameters
    ----------
    kind : the registry, such as "optimizers".
    name : the entry.
    settings : keyword arguments of the entry.
    """

    kind: str
    name: str
    settings: FrozenDict = field(default_factory=FrozenDict)

    def __repr__(self) -> str:
        return f"{self.kind}.{self.name}({', '.join(f'{key}={value!r}' for key, value in self.settings.items())})"


@dataclass(frozen=True)
class Entry:
    """A name of a registry. Call it with settings to choose it: `partitions.dirichlet(devices=20, alpha=0.3)`.

    Parameters
    ----------
    kind : the registry, such as "optimizers".
    name : the name.
    target : the class or function itself.
    passed : arguments that fedloom passes itself.
    """

    kind: str
    name: str
    target: Any
    passed: tuple[str, ...] = ()

    def __call__(self, *positional: Any, **settings: Any) -> Choice:
        if positional:
            example = next(iter(self.parameters), "name")
            raise TypeError(f"{self.kind}.{self.name} takes its settings by name, such as {example}={positional[0]!r}")
        known = [] if self.is_value else list(settable_parameters(self.target))
        for name in settings:
            if name not in known and not self.takes_any_setting:
                raise TypeError(f"{self.kind}.{self.name} has no setting {name!r}; {suggest(name, self.parameters)}")
        return Choice(self.kind, self.name, freeze(settings))

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The settings, by name."""
        return {} if self.is_value else settable_parameters(self.target, self.passed)

    @property
    def is_value(self) -> bool:
        """True for an entry that has no settings because it is a value itself, such as a preparation or a format."""
        return is_dataclass(self.target) and not isinstance(self.target, type)

    @property
    def takes_any_setting(self) -> bool:
        """True if the entry takes settings of any name."""
        return callable(self.target) and accepts_any_keyword(self.target)

    @property
    def summary(self) -> str:
        """The first sentence of the entry's docstring, or a value in words; "" if there is no docstring of its own."""
        return str(self.target) if self.is_value or isinstance(self.target, Exception) else first_sentence(self.target)

    def __repr__(self) -> str:
        return f"<{self.kind}.{self.name}: {self.summary}>"


class Registry(Mapping[str, T], Generic[T]):
    """An open table of names of one kind: `registry["name"]` is the class or function, `registry.name` its `Entry`.

    Installed packages add names by entry points in the group `fedloom.<kind>`, which are loaded when used. A built-in
    or registered name wins over an entry point.

    Parameters
    ----------
    kind : its name in the plural, such as "optimizers".
    entries : the built-in names.
    passed : arguments of the entries that fedloom passes itself, so that no recipe sets them.
    """

    def __init__(self, kind: str, entries: Mapping[str, T], passed: Iterable[str] = ()):
        self.kind, self.passed = kind, tuple(passed)
        self.built_in = dict(entries)
        self._entries = dict(entries)
        self._loaded: dict[str, T] = {}

    @cached_property
    def _installed(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=f"fedloom.{self.kind}")}

    @overload
    def register(self, name: str, entry: D, *, replace: bool = ...) -> D: ...
    @overload
    def register(self, name: str, *, replace: bool = ...) -> Callable[[D], D]: ...
    def register(self, name: str, entry: Any = None, *, replace: bool = False) -> Any:
        """Add a name for this process.

        Parameters
        ----------
        name : what recipes call it.
        entry : the class or function; without it, `register` is a decorator.
        replace : whether an existing name may be replaced; else that is an error.

        Returns
        -------
        The entry, unchanged.

        Examples
        --------
        >>> @fl.partitions.register("every_other")
        ... def every_other(labels, devices, generator): ...
        """
        if entry is None:
            return partial(self.register, name, replace=replace)
        if name in self._entries and self._entries[name] is not entry and not replace:
            raise ValueError(f"there is already {self.kind}.{name}; pass replace=True to replace it")
        self._entries[name] = entry
        return entry

    def __getitem__(self, name: str) -> T:
        if name in self._entries:
            return self._entries[name]
        if name not in self._loaded:
            if name not in self._installed:
                raise KeyError(name)
            try:
                self._loaded[name] = self._installed[name].load()
            except Exception as error:  # anything that a package's code may raise
                raise EntryPointError(self.kind, self._installed[name], error) from error
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._installed

    def __iter__(self) -> Iterator[str]:
        yield from self._entries
        yield from (name for name in self._installed if name not in self._entries)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getattr__(self, name: str) -> Entry:
        if name.startswith("_"):
            raise AttributeError(name)
        key = next((one for one in (name, name.replace("_", "-")) if one in self), None)
        if key is None:
            raise AttributeError(f"there is no {self.kind}.{name}; {suggest(name, self)}")
        return Entry(self.kind, key, self[key], self.passed)

    def __dir__(self) -> list[str]:
        return [*(name.replace("-", "_") for name in self), "register"]

    def __repr__(self) -> str:
        return f"<{self.kind}: {', '.join(self)}>"

    def __reduce__(self) -> Any:
        raise TypeError("a registry belongs to its process")

    def source(self, name: str) -> str:
        """Where a name comes from: "built in", "registered", or the package that installed it.

        Parameters
        ----------
        name : the name.
        """
        if name in self.built_in and self._entries[name] is self.built_in[name]:
            return "built in"
        if name in self._entries:
            return "registered"
        distribution = self._installed[name].dist
        return distribution.name if distribution else "installed"


class Layered(Mapping[str, T], Generic[T]):
    """A table of names with others on top, which win. Nothing is loaded before it is looked up.

    Parameters
    ----------
    top : the names that win.
    below : the others.
    """

    def __init__(self, top: Mapping[str, T], below: Mapping[str, T]):
        self.top, self.below = dict(top), below

    def entries(self) -> dict[str, T]:
        """The names of all layers above a registry."""
        below = self.below.entries() if isinstance(self.below, Layered) else {}
        return {**below, **self.top}

    def __getitem__(self, name: str) -> T:
        return self.top[name] if name in self.top else self.below[name]

    def __contains__(self, name: object) -> bool:
        return name in self.top or name in self.below

    def __iter__(self) -> Iterator[str]:
        yield from self.below
        yield from (name for name in self.top if name not in self.below)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<names: {', '.join(self)}>"


def find_name(table: Mapping[str, Any], entry: Any) -> str | None:
    """The name of a class or function in a table; None if it has none.

    Parameters
    ----------
    table : names and entries.
    entry : the class or function.
    """
    for name in table:
        with suppress(EntryPointError):
            if table[name] is entry:
                return name
    return None


def dataclass_settings(value: Any) -> dict[str, Any]:
    """The fields of a dataclass instance that differ from their defaults, by name.

    Parameters
    ----------
    value : the instance; anything else has none.
    """
    if not is_dataclass(value) or isinstance(value, type):
        return {}
    return {
        known.name: getattr(value, known.name)
        for known in fields(value)
        if known.init and not _equal(getattr(value, known.name), known.default)
    }


def _equal(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def settable_parameters(function: Callable[..., Any], passed: Iterable[str] = ()) -> dict[str, inspect.Parameter]:
    """The named parameters of a function without those that fedloom passes itself.

    Parameters
    ----------
    function : the class or function.
    passed : what fedloom passes itself.
    """
    excluded = set(passed)
    if not callable(function):
        return {}
    return {
        name: p
        for name, p in inspect.signature(function).parameters.items()
        if name not in excluded and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }


def accepts_any_keyword(function: Callable[..., Any]) -> bool:
    """True if a function takes keyword arguments of any name.

    Parameters
    ----------
    function : the class or function.
    """
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def first_sentence(target: Any) -> str:
    """The first sentence of a docstring, on one line; "" where there is none of its own.

    Parameters
    ----------
    target : the class, function or value.
    """
    text = inspect.cleandoc(_own_doc(target)).split("\n\n")[0].replace("\n", " ")
    head, dot, _ = text.partition(". ")
    return head + "." if dot else text


def _own_doc(target: Any) -> str:
    doc = (target if callable(target) else type(target)).__doc__ or ""
    name = getattr(target, "__name__", "")
    return "" if doc.startswith(f"{name}(") else doc  # a dataclass without a docstring has its signature


def suggest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the closest known one, or else all of them.

    Parameters
    ----------
    name : the unknown name.
    known : the known ones.
    """
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def freeze(value: Any) -> Any:
    """Settings as hashable values: lists become tuples, mappings become frozen dicts, at every depth.

    Parameters
    ----------
    value : the settings, or one of them.
    """
    if isinstance(value, Mapping):
        return FrozenDict({key: freeze(item) for key, item in value.items()})
    return tuple(freeze(item) for item in value) if isinstance(value, list | tuple) else value
