"""Server and devices run the same code, so they need the same major and minor version of fedloom.

Both ends state theirs in every message and refuse another by name. This file imports nothing of Flower.
"""

import re
from typing import Any

from .. import __version__

VERSION = __version__

VERSION_KEY = "fedloom"
"""Under this name a message states the version of its sender."""

UNKNOWN = "an unknown version"


def is_compatible(theirs: Any) -> bool:
    """True if major and minor version are those of this process.

    Parameters
    ----------
    theirs : the version that the other end states.
    """
    mine, other = _release(VERSION), _release(theirs)
    return mine is not None and mine == other


def explain_versions(theirs: Any, is_server: bool) -> str:
    """What both ends have, and what to do about it.

    Parameters
    ----------
    theirs : the version that the other end states.
    is_server : whether this process is the server.
    """
    other = theirs if isinstance(theirs, str) and _release(theirs) else UNKNOWN
    device, server = (other, VERSION) if is_server else (VERSION, other)
    text = f"the device has fedloom {device}, the server {server}"
    wanted = _release(server)
    if is_compatible(theirs) or wanted is None:
        return text
    return f"{text}; on the device: pip install 'fedloom[flower]=={wanted[0]}.{wanted[1]}.*'"


def _release(version: Any) -> tuple[str, str] | None:
    """Major and minor version."""
    match = re.match(r"(\d{1,4})\.(\d{1,4})(?=\D|$)[\w.+-]{0,40}$", version) if isinstance(version, str) else None
    return (match[1], match[2]) if match else None
