"""The pages are correct: code and commands run, links lead somewhere, listings equal the source."""

import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest

from fedloom.cli.app import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
RUN_BY_CI = ("make run", "make test", "make docs", "pip install")  # by continuous integration, in a fresh clone
DEMONSTRATION = "fedloom run"  # what `make run` runs


SLOW = (
    "README.md",
    "docs/index.md",
    "docs/how_to/architectures.md",
    "docs/how_to/compression.md",
    "docs/how_to/export.md",
    "docs/how_to/faults.md",
    "docs/how_to/plan.md",
    "docs/how_to/report.md",
    "docs/how_to/reproduce.md",
    "docs/how_to/resume.md",
    "docs/how_to/subnet.md",
    "docs/how_to/text.md",
    "docs/how_to/track.md",
    "docs/tutorials/own_method.md",
)


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def mark_slow(page: Path) -> object:
    """Pages that take more than a few seconds run with `make test-slow`."""
    return pytest.param(page, marks=pytest.mark.slow) if page_name(page) in SLOW else page


def read_commands(block: str) -> list[str]:
    return [line.split(" #")[0].strip() for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("page", [mark_slow(page) for page in PAGES], ids=page_name)
def test_page_blocks_run_in_order_succeed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that start with a file name are written to it, Python blocks run, fedloom commands must exit 0."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # blocks import each other
    for language, text in BLOCK.findall(page.read_text("utf-8")):
        file_name = re.match(r"# (\S+\.(?:py|toml))\n", text)
        if file_name:
            Path(file_name[1]).write_text(text, encoding="utf-8")
        if language == "python" and "from ..fleet" not in text:  # listings of the package are compared instead, below
            exec(compile(text, f"{page.name} block", "exec"), {"__name__": "block"})
        if language == "sh":
            for command in read_commands(text):
                run_command(command)


def run_command(command: str) -> None:
    if not command.startswith("fedloom ") or command == DEMONSTRATION:
        assert command.startswith((*RUN_BY_CI, DEMONSTRATION)), f"no test runs {command!r}"
        return
    with pytest.raises(SystemExit) as exit_info:
        main(shlex.split(command)[1:])
    assert exit_info.value.code == 0, command


def test_pages_all_together_show_commands() -> None:
    blocks = [block for page in PAGES for block in BLOCK.findall(page.read_text("utf-8"))]
    assert sum(len(read_commands(text)) for language, text in blocks if language == "sh") >= 12


def test_slow_pages_exist() -> None:
    assert set(SLOW) <= {page_name(page) for page in PAGES}


def test_one_round_page_listing_equals_heterofl_source() -> None:
    code = (ROOT / "src/fedloom/methods/heterofl.py").read_text("utf-8").strip()
    assert code in (DOCS / "concepts/one_round.md").read_text("utf-8")


@pytest.mark.parametrize("name", ["scaffold", "fedproto"])
def test_own_method_page_listing_equals_example(name: str) -> None:
    code = (ROOT / f"examples/{name}.py").read_text("utf-8")
    assert f"```python\n# {name}.py\n{code}```" in (DOCS / "tutorials/own_method.md").read_text("utf-8")


def test_one_round_page_order_of_folders_equals_import_contract() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"][0]
    layers = [set(layer.split(" | ")) for layer in reversed(contract["layers"])]
    sentence = (DOCS / "concepts/one_round.md").read_text("utf-8").partition("Folders import only")[2].split(". So ")[0]
    assert [set(re.findall(r"`(\w+)`", group)) for group in sentence.split("→")] == layers


def test_page_links_to_files_and_sections_exist() -> None:
    for page in PAGES:
        for target, section in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", page.read_text("utf-8")):
            path = page.parent / target if target else page
            assert path.exists(), f"{page.name} links to {target}"
            assert not section or section in section_anchors(path), f"{page.name} links to {target}#{section}"


def section_anchors(page: Path) -> set[str]:
    """The anchors that Markdown renderers give to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_results_page_section_of_claims_is_what_reproduce_writes(tmp_path: Path) -> None:
    from fedloom.api.reproduce import rewrite_page
    from fedloom.studies.published import read_claims

    names = ("results.json", "results.md", "analyses.toml")
    for name in names:
        shutil.copy(DOCS / name, tmp_path)
    rewrite_page(tmp_path / "results.json", read_claims(ROOT / "recipes"))
    assert [name for name in names if (tmp_path / name).read_bytes() != (DOCS / name).read_bytes()] == []


def test_readme_methods_are_complete() -> None:
    from fedloom.methods import METHODS

    text = (ROOT / "README.md").read_text("utf-8")
    assert all(f"`{name}`" in text for name in METHODS.built_in)


def test_recipes_first_line_is_their_command() -> None:
    recipes = [path for path in (ROOT / "recipes").rglob("*.toml") if path.parent.name != "ledger"]  # not recipes
    for recipe in sorted(recipes):
        path = recipe.relative_to(ROOT).as_posix()
        verbs = rf"run {path}|compare {path} --seeds \d+.*|deploy server {path} --fleet my-fleet"
        assert re.match(rf"# fedloom ({verbs})\n", recipe.read_text("utf-8")), path
