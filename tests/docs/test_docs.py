"""The documentation is true: its code runs, its commands work, its listings are the files they show."""

import re
import shlex
from pathlib import Path

import pytest

from fedloom.cli.app import main

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
RUN_BY_CI = ("make run", "make test")  # continuous integration and the fresh-clone check run these two


def commands(text: str) -> list[str]:
    return [line.split(" #")[0].strip() for line in text.splitlines() if line.strip()]


LONG = (
    "README.md",
    "bytes.md",
    "export.md",
    "faults.md",
    "plan.md",
    "report.md",
    "reproduce.md",
    "resume.md",
    "text.md",
)


def slow_if_long(page: Path) -> object:
    """What takes more than a few seconds waits for `make test-slow`."""
    return pytest.param(page, marks=pytest.mark.slow) if page.name in LONG else page


@pytest.mark.parametrize("page", [slow_if_long(page) for page in PAGES], ids=lambda page: page.name)
def test_every_block_of_a_page_works_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that open with a file's name are written to it; Python blocks run; fedloom commands must exit 0."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    for language, text in BLOCK.findall(page.read_text("utf-8")):
        named = re.match(r"# (\S+\.(?:py|toml))\n", text)
        if named:
            Path(named[1]).write_text(text, encoding="utf-8")
        if language == "python" and "from ..fleet" not in text:  # the package's own files are compared instead
            exec(compile(text, f"{page.name} block", "exec"), {"__name__": "block"})
        if language == "sh":
            for command in commands(text):
                run_command(command)


def run_command(command: str) -> None:
    if not command.startswith("fedloom "):
        assert command.startswith(RUN_BY_CI), f"no test runs {command!r}"
        return
    with pytest.raises(SystemExit) as done:
        main(shlex.split(command)[1:])
    assert done.value.code == 0, command


def test_the_pages_show_commands() -> None:
    blocks = [block for page in PAGES for block in BLOCK.findall(page.read_text("utf-8"))]
    assert sum(len(commands(text)) for language, text in blocks if language == "sh") >= 12


def test_one_round_shows_heterofl_in_full() -> None:
    code = (ROOT / "src/fedloom/methods/heterofl.py").read_text("utf-8").strip()
    assert code in (ROOT / "docs/one_round.md").read_text("utf-8")


def test_every_link_between_pages_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_names_every_method() -> None:
    from fedloom.methods import METHODS

    text = (ROOT / "README.md").read_text("utf-8")
    assert all(f"`{name}`" in text for name in METHODS)


def test_every_recipe_opens_with_its_command() -> None:
    recipes = [one for one in (ROOT / "recipes").rglob("*.toml") if one.parent.name != "ledger"]  # those are lists
    for recipe in sorted(recipes):
        place = recipe.relative_to(ROOT).as_posix()
        verbs = rf"run {place}|compare {place} --seeds \d+.*|deploy server {place} --fleet my-fleet"
        assert re.match(rf"# fedloom ({verbs})\n", recipe.read_text("utf-8")), place


def test_the_recipe_page_names_every_key() -> None:
    from fedloom.recipe.load import SECTIONS
    from fedloom.recipe.schema import Recipe, TierConfig

    text = (ROOT / "docs/recipe.md").read_text("utf-8")
    keys = {field.alias or name for part in (*SECTIONS.values(), TierConfig) for name, field in part.model_fields.items()}
    assert len(keys) > 20
    missing = [key for key in sorted(keys | {"seed", "rounds"}) if f"`{key}`" not in text]
    assert missing == []
    assert all(f"[{name}]" in text for name in Recipe.model_fields if name in SECTIONS)
