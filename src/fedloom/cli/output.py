"""stdout is data, stderr is progress; every failure has a code, a sentence and an exit status."""

import itertools
import json
import logging
import math
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from .. import logs
from ..wording import terminal_width

if TYPE_CHECKING:
    from ..recipe.errors import RecipeError


SCHEMA_VERSION = 1
OK, RUN_FAILED, NO_QUORUM, BAD_INPUT, OUR_BUG, INTERRUPTED = 0, 1, 3, 4, 5, 130


NUMBER = r"(?:[\d.,()%±+\s*–/\[\]><-]|\b[kMGT]?B?\b)*"  # also with a unit, as in "1.92 M / 511 k"


class OutputFormat(StrEnum):
    text = "text"
    json = "json"


class Exit(Exception):  # noqa: N818 - not an error: the way out
    def __init__(self, code: int):
        self.code = code


def write(text: str = "") -> None:
    """Write data for people to stdout."""
    sys.stdout.write(text + "\n")


def emphasize(text: str) -> str:
    """The text in bold, on a terminal that shows it and whose user has not set NO_COLOR."""
    plain = not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain else f"\x1b[1m{text}\x1b[0m"


def write_json(data: Any) -> None:
    """Write data for programs to stdout: one object."""
    document = {"schema_version": SCHEMA_VERSION, "status": "ok", "data": _without_nan(data)}
    json.dump(document, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def _without_nan(data: Any) -> Any:
    """Numbers that are not finite become null: JSON has no other way to write them."""
    if isinstance(data, dict):
        return {key: _without_nan(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_without_nan(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def wants_json(arguments: Sequence[str]) -> bool:
    pairs = itertools.pairwise(arguments)
    return "--format=json" in arguments or ("--format", "json") in pairs


@contextmanager
def exits(format: StrEnum, quiet: bool = False) -> Iterator[None]:
    """Show log records on stderr, only warnings if `quiet`; turn an exception into a message and an exit code."""
    as_json = format == OutputFormat.json
    try:
        with logs.showing(logging.WARNING if quiet else logging.INFO):
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
        if is_usage_error(error):
            raise
        raise Exit(_report(error, as_json)) from None


def is_usage_error(error: Exception) -> bool:
    """True for typer's errors about arguments. The class moves between releases; only it has this method."""
    return hasattr(error, "format_message")


def _report(error: Exception, as_json: bool) -> int:
    """Report what went wrong; returns the exit code."""
    from ..data import DataError
    from ..recipe.errors import RecipeError
    from ..runs.faults import NoQuorum
    from ..runs.recorder import NothingAdmitted
    from ..studies.reproduce import RunsFailed
    from ..studies.tune import SearchFailed

    if isinstance(error, NoQuorum):
        report_failure("NO_QUORUM", str(error), error.hint, as_json)
        return NO_QUORUM
    if isinstance(error, NothingAdmitted):
        report_failure("NOTHING_ADMITTED", str(error), error.hint, as_json)
        return RUN_FAILED
    if isinstance(error, SearchFailed):
        report_failure("SEARCH_FAILED", str(error), error.hint, as_json)
        return RUN_FAILED
    if isinstance(error, RunsFailed):
        report_failure("RUNS_FAILED", error.message, error.hint, as_json)
        return RUN_FAILED
    if isinstance(error, RecipeError):
        return report_recipe_errors([error], as_json)
    if isinstance(error, DataError):
        report_failure(data_error_code(error), error.message, error.hint, as_json)
        return BAD_INPUT
    sys.stderr.write("".join(traceback.format_exception(error)))
    modules = (str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__))
    in_user_code = any(name.startswith("fedloom_user_") for name in modules)
    code, hint = ("USER_CODE", "the traceback ends in your own file") if in_user_code else ("BUG", "please report this")
    report_failure(code, f"{type(error).__name__}: {error}", hint, as_json)
    return RUN_FAILED if in_user_code else OUR_BUG


def report_failure(code: str, message: str, hint: str, as_json: bool) -> None:
    if as_json:
        failure = {"schema_version": SCHEMA_VERSION, "status": "error", "error_code": code, "message": message}
        json.dump({**failure, "hint": hint}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        sys.stderr.write(f"error {code}: {message}\n" + (f"  hint: {hint}\n" if hint else ""))


def report_recipe_errors(errors: "Sequence[RecipeError]", as_json: bool) -> int:
    """Report all issues of some recipes; returns the exit code."""
    lines = "\n".join(line for error in errors for line in error.lines())
    first = errors[0].issues[0]
    if as_json:
        report_failure(first.code, lines, first.hint, True)
    else:
        sys.stderr.write(lines + "\n")
    return BAD_INPUT


def data_error_code(error: Exception) -> str:
    from ..data import DataMissing

    return "DATA_MISSING" if isinstance(error, DataMissing) else "DATA_BROKEN"


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain table: text left-aligned, numbers right-aligned.

    A table that is wider than the terminal is broken before a column of numbers into several, each with the first
    column.
    """
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    numeric = [all(re.fullmatch(NUMBER, row[i]) for row in rows) for i in range(len(header))]
    blocks = [[0]]
    for index in range(1, len(header)):
        if (
            numeric[index]
            and len(blocks[-1]) > 1
            and sum(widths[i] + 2 for i in [*blocks[-1], index]) - 2 > terminal_width()
        ):
            blocks.append([0])
        blocks[-1].append(index)
    return "\n\n".join(_block(header, rows, indices, widths, numeric) for indices in blocks)


def _block(
    header: Sequence[str], rows: Sequence[Sequence[str]], indices: Sequence[int], widths: Sequence[int],
    numeric: Sequence[bool],
) -> str:  # fmt: skip
    lines = (
        "  ".join(row[i].rjust(widths[i]) if numeric[i] else row[i].ljust(widths[i]) for i in indices)
        for row in (header, *rows)
    )
    return "\n".join(line.rstrip() for line in lines)
