"""stdout is data, stderr is progress; every failure has a code, a sentence and an exit status."""

import itertools
import json
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

SCHEMA_VERSION = 1
OK, RUN_FAILED, BAD_INPUT, OUR_BUG, INTERRUPTED = 0, 1, 4, 5, 130


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
    json.dump({"schema_version": SCHEMA_VERSION, "status": "ok", "data": data}, sys.stdout, indent=2)
    sys.stdout.write("\n")


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
def exits(format: Format) -> Iterator[None]:
    """Turn whatever ends a verb early into a message and an exit code."""
    from ..data import DataBroken, DataMissing
    from ..experiment import RecipeError

    as_json = format is Format.json
    try:
        yield
    except RecipeError as error:
        first = error.problems[0]
        if as_json:
            report_failure(first.code, "\n".join(error.lines()), first.hint, True)
        else:
            sys.stderr.write("\n".join(error.lines()) + "\n")
        raise Exit(BAD_INPUT) from None
    except (DataMissing, DataBroken) as error:
        code = "DATA_MISSING" if isinstance(error, DataMissing) else "DATA_BROKEN"
        report_failure(code, error.message, error.hint, as_json)
        raise Exit(BAD_INPUT) from None
    except KeyboardInterrupt:
        report_failure("INTERRUPTED", "interrupted", "", as_json)
        raise Exit(INTERRUPTED) from None
    except OSError as error:
        report_failure("SYSTEM", str(error), "", as_json)
        raise Exit(RUN_FAILED) from None
    except Exception as error:
        users = any(
            "fedloom_user_" in str(frame.f_globals.get("__name__"))
            for frame, _ in traceback.walk_tb(error.__traceback__)
        )
        code, hint = (
            ("USER_CODE", "the traceback above ends in your own file") if users else ("BUG", "please report this")
        )
        sys.stderr.write(traceback.format_exc())
        report_failure(code, f"{type(error).__name__}: {error}", hint, as_json)
        raise Exit(RUN_FAILED if users else OUR_BUG) from None


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain table: words to the left, columns of numbers to the right."""
    places = range(len(header))
    widths = [max(len(row[place]) for row in (header, *rows)) for place in places]
    numbers = [all(re.fullmatch(r"[\d.,()%±+\s-]*", row[place]) for row in rows) for place in places]
    lines = (
        "  ".join(row[p].rjust(widths[p]) if numbers[p] else row[p].ljust(widths[p]) for p in places)
        for row in (header, *rows)
    )
    return "\n".join(line.rstrip() for line in lines)
