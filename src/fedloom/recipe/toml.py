"""Write TOML. The standard library only reads it, and a recipe needs no more than this."""

import json
import re
from collections.abc import Mapping
from typing import Any


def dumps(document: Mapping[str, Any]) -> str:
    """Values first, then a table for each mapping and each entry of a list of mappings."""
    lines = [f"{_key(key)} = {written(value)}" for key, value in document.items() if not _is_table(value)]
    for name, value in document.items():
        if not _is_table(value):
            continue
        header = f"[{_key(name)}]" if isinstance(value, Mapping) else f"[[{_key(name)}]]"
        for table in [value] if isinstance(value, Mapping) else value:
            lines += ["", header, *(f"{_key(key)} = {written(one)}" for key, one in table.items())]
    return "\n".join(lines) + "\n"


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list | tuple) and bool(value) and all(isinstance(one, Mapping) for one in value)
    )


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON lets it stand, TOML does not


def written(value: Any) -> str:
    """One value, on one line."""
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(int(value))
        case float():
            return repr(float(value))  # inf, -inf and nan are spelled alike in both languages
        case str():
            return _text(value)
        case list() | tuple():
            return "[" + ", ".join(written(one) for one in value) + "]"
        case Mapping():
            inside = ", ".join(f"{_key(key)} = {written(one)}" for key, one in value.items() if one is not None)
            return f"{{ {inside} }}" if inside else "{}"
        case _:
            raise TypeError(f"TOML has no word for {type(value).__name__}")
