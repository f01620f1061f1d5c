"""stdout is data, stderr is progress; every failure has a code, a sentence and an exit status."""

import itertools
import json
import math
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..recipe.errors import RecipeError


SCHEMA_VERSION = 1
OK, RUN_FAILED, TOO_FEW, BAD_INPUT, OUR_BUG, INTERRUPTED = 0, 1, 3, 4, 5, 130


class Format(StrEnum):
    text = "text"
    json = "json"


class Exit(Exception):  # noqa: N818 - not an error: the way out
    def __init__(self, code: int):
        self.code = code


def say(text: str = "") -> None:
    """Data, for people."""
    sys.stdout.write(text + "\n")


def say_json(data: Any) -> None:
    """Data, for programs: one object."""
    said = {"schema_version": SCHEMA_VERSION, "status": "ok", "data": _plain(data)}
    json.dump(said, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def _plain(data: Any) -> Any:
    """JSON has no word for a number that is not finite."""
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def note(text: str, quiet: bool = False) -> None:
    """Progress."""
    if not quiet:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def wants_json(arguments: Sequence[str]) -> bool:
    pairs = itertools.pairwise(arguments)
    return "--format=json" in arguments or ("--format", "json") in pairs


def report_failure(code: str, message: str, hint: str, as_json: bool) -> None:
    if as_json:
        failure = {"schema_version": SCHEMA_VERSION, "status": "error", "error_code": code, "message": message}
        json.dump({**failure, "hint": hint}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        sys.stderr.write(f"error {code}: {message}\n" + (f"  hint: {hint}\n" if hint else ""))


@contextmanager
def exits(format: StrEnum) -> Iterator[None]:
    """Turn whatever ends a verb early into a message and an exit code."""
    as_json = format == Format.json
    try:
        yield
    except Exit:
        raise
    except KeyboardInterrupt:
        report_failure("INTERRUPTED", "interrupted", "", as_json)
        raise Exit(INTERRUPTED) from None
    except OSError as error:
        report_failure("SYSTEM", str(error), "", as_json)
        raise Exit(RUN_FAILED) from None
    except Exception as error:
        raise Exit(_explained(error, as_json)) from None


def _explained(error: Exception, as_json: bool) -> int:
    """Say what is wrong, and whose fault it is."""
    from ..data import DataError
    from ..recipe.errors import RecipeError
    from ..runs.faults import NoQuorum
    from ..runs.recorder import NothingAdmitted
    from ..studies.reproduce import RunsFailed

    if isinstance(error, NoQuorum):
        report_failure("NO_QUORUM", str(error), error.hint, as_json)
        return TOO_FEW
    if isinstance(error, NothingAdmitted):
        report_failure("NOTHING_ADMITTED", str(error), error.hint, as_json)
        return RUN_FAILED
    if isinstance(error, RunsFailed):
        report_failure("RUNS_FAILED", error.message, error.hint, as_json)
        return RUN_FAILED
    if isinstance(error, RecipeError):
        return refuse_recipes([error], as_json)
    if isinstance(error, DataError):
        report_failure(data_code(error), error.message, error.hint, as_json)
        return BAD_INPUT
    sys.stderr.write("".join(traceback.format_exception(error)))
    frames = (str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__))
    users = any(name.startswith("fedloom_user_") for name in frames)
    code, hint = ("USER_CODE", "the traceback ends in your own file") if users else ("BUG", "please report this")
    report_failure(code, f"{type(error).__name__}: {error}", hint, as_json)
    return RUN_FAILED if users else OUR_BUG


def data_code(error: Exception) -> str:
    return "DATA_MISSING" if type(error).__name__ == "DataMissing" else "DATA_BROKEN"


def refuse_recipes(errors: "Sequence[RecipeError]", as_json: bool) -> int:
    """All that is wrong with recipes, in the one form; returns the exit code."""
    lines = "\n".join(line for error in errors for line in error.lines())
    first = errors[0].problems[0]
    if as_json:
        report_failure(first.code, lines, first.hint, True)
    else:
        sys.stderr.write(lines + "\n")
    return BAD_INPUT


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain table: words to the left, columns of numbers to the right."""
    places = range(len(header))
    widths = [max(len(row[place]) for row in (header, *rows)) for place in places]
    numbers = [all(re.fullmatch(r"[\d.,()%±+\s*–/\[\]><-]*", row[place]) for row in rows) for place in places]
    lines = (
        "  ".join(row[p].rjust(widths[p]) if numbers[p] else row[p].ljust(widths[p]) for p in places)
        for row in (header, *rows)
    )
    return "\n".join(line.rstrip() for line in lines)
