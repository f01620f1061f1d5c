"""Output of benchmarks: a table for people, or one JSON document."""

import json
import sys
from collections.abc import Sequence
from typing import Any


def write_output(text: str, data: dict[str, Any], kind: str) -> None:
    if kind == "json":
        text = json.dumps({"schema_version": 1, "status": "ok", "data": data}, indent=2)
    sys.stdout.write(text.rstrip("\n") + "\n")


def progress(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A plain table; the first `left` columns are left-aligned, the others right-aligned."""
    sizes = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(size) if at < left else cell.rjust(size)
            for at, (cell, size) in enumerate(zip(row, sizes, strict=True))
        ).rstrip()
        for row in [head, *rows]
    )
