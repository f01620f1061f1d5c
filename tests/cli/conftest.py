"""The command line called in this process, and a recipe that runs in less than a second."""

import contextlib
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

from fedloom.cli.app import main

SMALL = """\
# two tiers on the bundled digits
seed = 0
rounds = 2

[data]
dataset = "digits"
devices = 4

[model]
family = "convnet"
hidden = [2, 4]

[[tiers]]
name = "large"
share = 0.5
width = 1.0

[[tiers]]
name = "small"
share = 0.5
width = 0.5

[training]
batch_size = 100

[method]
name = "heterofl"
"""


class ReportedIssue(NamedTuple):
    """One issue of a recipe as a person reads it."""

    where: str
    what: str
    code: str
    message: str
    hint: str


@dataclass(frozen=True)
class CommandResult:
    """What a command left behind: its exit code and both of its streams."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout, in strict JSON, without NaN and Infinity."""
        content: dict[str, Any] = json.loads(self.out, parse_constant=_no_number)
        return content

    @property
    def issues(self) -> "list[ReportedIssue]":
        """Issues of a recipe, as reported on stderr: a head, the error and maybe a hint each."""
        found = re.findall(r"(\S+)(?:  (.*))?\n  error ([A-Z_]+): (.*)\n(?:  hint: (.*)\n)?", self.err)
        return [ReportedIssue(*one) for one in found]

    @property
    def data(self) -> Any:
        content = self.json
        assert list(content) == ["schema_version", "status", "data"]
        assert (content["schema_version"], content["status"]) == (1, "ok")
        return content["data"]

    @property
    def failure(self) -> dict[str, Any]:
        content = self.json
        assert list(content) == ["schema_version", "status", "error_code", "message", "hint"]
        assert (content["schema_version"], content["status"]) == (1, "error")
        return content


def _no_number(word: str) -> NoReturn:
    raise AssertionError(f"{word} is not JSON")


def call(*arguments: object) -> CommandResult:
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as left,
    ):
        main([str(argument) for argument in arguments])
    assert isinstance(left.value.code, int)
    return CommandResult(left.value.code, out.getvalue(), err.getvalue())


Write = Callable[..., Path]
"""write(*(old, new), to="my.toml"): the small recipe with some of its text replaced."""


def writer(folder: Path) -> Write:
    def write(*changes: tuple[str, str], to: str = "my.toml") -> Path:
        text = SMALL
        for old, new in changes:
            assert text.count(old) == 1, f"{old!r} must stand once in the recipe"
            text = text.replace(old, new)
        (folder / to).write_text(text, encoding="utf-8")
        return folder / to

    return write


@pytest.fixture
def fedloom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CommandResult]:
    """The command, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("FEDLOOM_DATA", "FEDLOOM_DOWNLOAD"):
        monkeypatch.delenv(name, raising=False)
    return call


@pytest.fixture(scope="module")
def fedloom_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Callable[..., CommandResult], Write, Path]]:
    """The command for a whole module of tests: (call, write, folder)."""
    folder = tmp_path_factory.mktemp("module")
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder):
        for name in ("FEDLOOM_DATA", "FEDLOOM_DOWNLOAD"):
            patch.delenv(name, raising=False)
        yield call, writer(folder), folder


@pytest.fixture
def write(tmp_path: Path) -> Write:
    return writer(tmp_path)


@pytest.fixture
def files(tmp_path: Path) -> Callable[[], Mapping[str, str]]:
    """All files and folders with hashes of their contents, to check that nothing was written."""

    def look() -> Mapping[str, str]:
        return {
            str(path.relative_to(tmp_path)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "/"
            for path in sorted(tmp_path.rglob("*"))
            if "__pycache__" not in path.parts
        }

    return look


@pytest.fixture
def line_of() -> Callable[[Path, str], int]:
    """The number of the only line of a file with this prefix."""

    def find(path: Path, begins: str) -> int:
        lines = path.read_text(encoding="utf-8").splitlines()
        (number,) = [number for number, line in enumerate(lines, 1) if line.startswith(begins)]
        return number

    return find
