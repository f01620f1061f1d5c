"""The trackers of a run: chosen by name or object, and never able to stop the run."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..evaluation import Row
from ..recipe.errors import RecipeError, recipe_error
from ..registry import Choice, Entry, suggest
from ..tracking import EXTRAS, TRACKERS, TrackedRun, Tracker
from .folder import read_rows

logger = logging.getLogger(__name__)

Callback = Callable[[Sequence[Row]], object]
TrackerChoice = str | Entry | Choice | type[Tracker] | Tracker | Callback
"""A name of TRACKERS, also with settings, a class, a tracker, or a function of a round's rows."""


@dataclass(frozen=True)
class FunctionTracker(Tracker):
    """Calls a function with the rows of each round. Rounds before a resumption are not repeated.

    Parameters
    ----------
    function : Callable[[Sequence[Row]], object]
        What it returns is ignored.
    """

    function: Callback

    def rows(self, rows: Sequence[Row]) -> None:
        self.function(rows)


@dataclass
class Trackers:
    """The trackers of one run. One that fails is reported once and then dropped."""

    name: str = ""  # of the run; empty: the name of its folder
    each: dict[str, Tracker] = field(default_factory=dict)

    @contextmanager
    def follow(self, folder: Path, recipe: Mapping[str, Any], resumed: bool, test: str = "global") -> Iterator[None]:
        """Begin with the run, and end with its status however it ends."""
        kept = list(read_rows(folder)) if self.each else []
        run = TrackedRun(folder, self.name or folder.resolve().name, recipe, headline_first(kept, test), resumed, test)
        self._call_each(lambda tracker: tracker.begin(run))
        status = "interrupted"
        try:
            yield
            status = "finished"
        except Exception:
            status = "failed"
            raise
        finally:
            self._call_each(lambda tracker: tracker.end(status))

    def rows(self, rows: Sequence[Row]) -> None:
        self._call_each(lambda tracker: tracker.rows(rows))

    def _call_each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.each.items()):
            try:
                call(tracker)
            except Exception as error:  # any error of a third-party library
                del self.each[name]
                logger.warning("%s is dropped for the rest of the run: %s: %s", name, type(error).__name__, error)


NONE = Trackers()


def headline_first(rows: Sequence[Row], test: str) -> list[Row]:
    """The rows, with those on the test that the method is for in front of each round's others.

    Trackers that show curves in the order in which they appear then begin with those that matter.
    """
    order = sorted(range(len(rows)), key=lambda at: (rows[at].round, _is_other_test(rows[at], test), at))
    return [rows[at] for at in order]


def _is_other_test(row: Row, test: str) -> bool:
    return test != "global" and row.test != test  # global tests come first by themselves


def build_trackers(
    track: Sequence[TrackerChoice], run: str = "", *, several_runs: bool = False, source: str = "track"
) -> Trackers:
    """Build the trackers of one run.

    Parameters
    ----------
    track : Sequence[TrackerChoice]
        Names of `TRACKERS`, with settings or without, classes, trackers and functions of a round's rows.
    run : str
        The name of the run; by default that of its folder.
    several_runs : bool
        Whether the same choices are used for several runs at a time, as in a comparison. Then only names and classes
        are allowed: a tracker or a function could not tell the runs apart.
    source : str
        The argument or option to name in errors.

    Returns
    -------
    Trackers
        One per choice; a name that is repeated counts once.

    Raises
    ------
    RecipeError
        If a name is unknown, a library is not installed, or an object is no tracker.

    Examples
    --------
    >>> list(build_trackers(["csv", print]).each)
    ['csv', 'print']
    """
    each: dict[str, Tracker] = {}
    for choice in track:
        label = _label(choice)
        if isinstance(choice, str) and label in each:
            continue
        if several_runs and not isinstance(choice, str | Entry | Choice | type):
            message = f"one {label} cannot follow several runs"
            raise recipe_error(source, "TRACKER_SHARED", message, "pass a class; every run gets a tracker of its own")
        number = sum(known == label or known.startswith(f"{label} ") for known in each)
        each[f"{label} {number + 1}" if number else label] = as_tracker(choice, source)
    return Trackers(run, each)


def as_tracker(choice: TrackerChoice, source: str = "track") -> Tracker:
    """The tracker that a name, a class, a tracker or a function stands for.

    Parameters
    ----------
    choice : TrackerChoice
        A class is called without arguments; a function becomes a `FunctionTracker`.
    source : str
        The argument or option to name in errors.

    Returns
    -------
    Tracker
        Ready for one run.

    Examples
    --------
    >>> as_tracker("csv")
    CSV(file='rows.csv', per_device=True)
    >>> as_tracker(print)
    FunctionTracker(function=<built-in function print>)
    """
    settings = choice.settings if isinstance(choice, Choice) else {}
    if isinstance(choice, str | Choice):
        choice = find_tracker(_label(choice), TRACKERS, source)
    if isinstance(choice, Entry | type):
        factory = choice.target if isinstance(choice, Entry) else choice
        return _construct(_label(choice), factory, settings, source)
    if isinstance(choice, Tracker):
        return choice
    if callable(choice):
        return FunctionTracker(choice)
    raise _not_a_tracker(choice, source)


def find_tracker(name: str, table: Mapping[str, Callable[..., Tracker]], source: str = "track") -> Entry:
    """The entry of a table; raises RecipeError with the known names if there is none."""
    if name not in table:
        raise recipe_error(source, "TRACKER_NAME", f"there is no tracker {name!r}", suggest(name, table))
    return Entry("trackers", name, table[name])


def _construct(name: str, factory: Callable[..., object], settings: Mapping[str, Any], source: str) -> Tracker:
    try:
        made = factory(**settings)
    except ImportError as error:
        package = EXTRAS.get(name, error.name)
        hint = f"pip install '{package}'" if package else ""
        raise recipe_error(source, "TRACKER_MISSING", f"{name} is not installed: {error}", hint) from None
    if not isinstance(made, Tracker):
        raise _not_a_tracker(made, source)
    return made


def _not_a_tracker(found: object, source: str) -> RecipeError:
    hint = "a tracker has the methods begin, rows and end"
    return recipe_error(source, "TRACKER_FORM", f"{type(found).__name__} is not a tracker", hint)


def _label(choice: TrackerChoice) -> str:
    """The name of a choice in messages."""
    if isinstance(choice, str):
        return choice
    if isinstance(choice, Entry | Choice):
        return choice.name
    return str(getattr(choice, "__name__", type(choice).__name__))
