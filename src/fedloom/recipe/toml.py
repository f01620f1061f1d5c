"""Write TOML with tomli-w. TOML has no null, so keys whose value is None are left out."""

from collections.abc import Mapping
from typing import Any

import tomli_w


def dumps(document: Mapping[str, Any]) -> str:
    return tomli_w.dumps(_without_none(document))


def dumps_value(value: Any) -> str:
    """A single value on one line, as it stands behind `key = `. tomli-w escapes line breaks inside strings."""
    text = tomli_w.dumps({"key": [[_without_none(value)]]}, indent=0).strip()
    for broken, joined in ((",\n]", "]"), ("[\n", "["), (",\n", ", ")):
        text = text.replace(broken, joined)
    return text.removeprefix("key = [[").removesuffix("]]")


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list | tuple) else value
