"""The documentation site: complete navigation, generated pages that describe everything, and nothing from outside."""

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml

from fedloom.recipe.schema import Recipe
from fedloom.settings import Count, Share
from scripts.docs_site import (
    NOTEBOOK,
    ROOT_PAGES,
    attribute_docs,
    command_reference,
    describe_type,
    entry_rows,
    examples,
    has_settings,
    inner_sections,
    names_reference,
    parameter_docs,
    recipe_reference,
    registries,
    root_page,
)

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def nav_pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav if isinstance(nav, list) else nav.values():
            yield from nav_pages(item)


def test_navigation_has_every_page_once() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    generated = [NOTEBOOK.replace(".ipynb", ".md"), *ROOT_PAGES.values()]
    assert sorted(nav_pages(config["nav"])) == sorted([*pages, *generated])


def test_site_config_uses_no_outside_fonts_and_fails_on_warnings() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    assert config["theme"]["font"] is False and config["strict"] is True
    assert {"search", "offline"} <= {plugin for plugin in config["plugins"] if isinstance(plugin, str)}


# ---------------------------------------------------------------------------------------------------------------------
# generated pages


def test_recipe_schema_describes_every_key() -> None:
    sections = [Recipe, *inner_sections(Recipe).values()]
    sections += [inner for section in sections[1:] for inner in inner_sections(section).values()]
    assert len(sections) > 15
    for section in sections:
        assert section.__doc__, section
        plain = set(section.model_fields) - (set(inner_sections(Recipe)) if section is Recipe else set())
        assert plain <= attribute_docs(section).keys(), section


def test_recipe_page_shows_every_section_and_key() -> None:
    text = recipe_reference()
    for name, section in inner_sections(Recipe).items():
        assert f"[{name}]" in text
        for key, field in section.model_fields.items():
            assert f"| `{field.alias or key}` |" in text, f"{name}.{key}"


def entries() -> list[Any]:
    from fedloom.methods import METHODS

    tables = [METHODS, *registries().values()]
    return [
        pytest.param(getattr(table, name.replace("-", "_")), id=f"{table.kind}-{name}")
        for table in tables
        for name in table.built_in
        if has_settings(getattr(table, name.replace("-", "_")))
    ]


@pytest.mark.parametrize("entry", entries())
def test_registry_entry_has_summary_and_describes_its_settings(entry: Any) -> None:
    assert entry.summary, "no docstring"
    assert [name for name, _, _, text in entry_rows(entry) if not text] == []


def test_examples_page_shows_every_program() -> None:
    text = examples()
    programs = [*(ROOT / "examples").glob("*.py")]
    assert programs and all(f"## {path.stem}\n" in text for path in programs)
    assert text.count("```python\n") == len(programs)


def test_names_page_shows_every_name() -> None:
    text = names_reference()
    for kind, table in registries().items():
        shown = [f"### {name} {{ #{kind}-{name} }}" in text or f"| `{name}` |" in text for name in table]
        assert shown and all(shown), kind


def test_command_page_lists_exit_codes_of_the_code() -> None:
    from fedloom.cli import output

    used = {output.OK, output.RUN_FAILED, output.NO_QUORUM, output.BAD_INPUT, output.OUR_BUG, output.INTERRUPTED}
    page = (DOCS / "reference/cli.md").read_text("utf-8")
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)} == used


def test_api_pages_show_every_public_name() -> None:
    import fedloom

    text = "\n".join(page.read_text("utf-8") for page in (DOCS / "reference" / "api").glob("*.md"))
    functions = [name for name in fedloom.__all__ if callable(getattr(fedloom, name))]
    assert {"Simulation", "run", "compare"} <= set(functions)
    assert [name for name in functions if f"::: fedloom.{name}\n" not in text] == []
    tables = set(fedloom.__all__) - set(functions) - {"logs", "testing"}
    assert [name for name in tables if f"`fl.{name}`" not in text] == []


def test_command_page_shows_and_describes_every_command() -> None:
    from fedloom.cli.app import VERBS

    text = command_reference()
    assert all(f"## fedloom {verb}\n" in text for verb in VERBS)
    assert "## fedloom deploy server\n" in text
    assert [line for line in text.splitlines() if re.match(r"^\| `.*\|\s*\|$", line)] == []


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (Count, "integer, ≥ 1"),
        (Share, "number, > 0 and ≤ 1"),
        (float | None, "number"),
        (tuple[Count, ...], "list of integers, ≥ 1"),
        (Literal["a", "b"], '`"a"` or `"b"`'),
        (Annotated[str, "free"], "string"),
        (dict[str, int], "table"),
        (Count | Literal["auto"], 'integer, ≥ 1; or `"auto"`'),
    ],
)
def test_describe_type_hint_says_type_and_range(hint: Any, words: str) -> None:
    assert describe_type(hint) == words


DOCSTRING = """Do it.

Parameters
----------
a : what a does,
    and more of it.
b, c : int
    Both of them.
**others : more.

Returns
-------
The result.
"""


def test_parameter_docs_both_styles_are_read() -> None:
    assert parameter_docs(DOCSTRING) == {
        "a": "what a does, and more of it.",
        "b": "Both of them.",
        "c": "Both of them.",
        "others": "more.",
    }
    assert parameter_docs("Do it.") == {} == parameter_docs(None)


def test_root_page_links_lead_from_docs() -> None:
    text = "[a](docs/a.md#b) [c](CHANGELOG.md) [d](LICENSE) [e](https://example.org)"
    assert root_page(text) == "[a](a.md#b) [c](changelog.md) d [e](https://example.org)"


# ---------------------------------------------------------------------------------------------------------------------
# the built site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    return folder


class Resources(HTMLParser):
    """What a page loads: not what it links to."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {"a": (), "link": ("href",)}.get(tag, ("src", "srcset", "data", "poster", "href"))
        self.addresses += [value for name, value in attrs if name in names and value]

    def handle_data(self, data: str) -> None:
        self.addresses += re.findall(r"(?:@import|url\()\s*[\"']?([^\"')\s]+)", data)


def is_outside(address: str) -> bool:
    return bool(re.match(r"(https?:)?//", address.strip()))


def test_resources_parser_finds_what_a_page_loads() -> None:
    page = Resources()
    page.feed(
        '<a href="https://a"></a><script src="https://b"></script><link href="//c"><style>@import "https://d"</style>'
    )
    assert [address for address in page.addresses if is_outside(address)] == ["https://b", "//c", "https://d"]


@pytest.mark.slow
def test_site_pages_load_nothing_from_outside(site: Path) -> None:
    pages = [*site.rglob("*.html")]
    assert len(pages) > 30
    for path in pages:
        page = Resources()
        page.feed(path.read_text("utf-8"))
        assert [address for address in page.addresses if is_outside(address)] == [], path
        assert "google" not in path.read_text("utf-8").lower()
    for path in site.rglob("*.css"):
        addresses = re.findall(r"(?:@import|url\()\s*[\"']?([^\"')\s]+)", path.read_text("utf-8"))
        assert [address for address in addresses if is_outside(address)] == [], path


@pytest.mark.slow
def test_site_search_finds_pages_when_opened_from_disk(site: Path) -> None:
    """Opened from disk the search index is a script, and the worker runs in a frame."""
    from tests.reporting.test_page_in_browser import programs

    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    paths, options = programs(), webdriver.ChromeOptions()
    options.binary_location = paths["chromium"]
    for one in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(one)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(paths["chromedriver"]))
    try:
        driver.set_window_size(1280, 900)
        driver.get((site / "index.html").as_uri())
        driver.find_element(By.CSS_SELECTOR, "input.md-search__input").send_keys("footprint")
        found = WebDriverWait(driver, 20).until(
            lambda it: it.find_elements(By.CSS_SELECTOR, "a.md-search-result__link")
        )
        assert any("concepts/" in str(link.get_attribute("href")) for link in found)
        requests = re.findall(
            r'"url":"(\w+:[^"]*)"', "\n".join(entry["message"] for entry in driver.get_log("performance"))
        )
        assert requests and not [url for url in requests if url.startswith("http")]
    finally:
        driver.quit()
