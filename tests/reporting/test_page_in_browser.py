"""The page in a real browser: first screen, toggles, hover, brush, live updates, accessibility and speed."""

import base64
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedloom.api.run import build_report
from fedloom.exporting.card import as_html
from fedloom.reporting.gallery import build_gallery
from fedloom.reporting.live import LiveServer
from fedloom.reporting.page import Page, build_page
from fedloom.reporting.report_data import read_report_data
from fedloom.runs.resume import list_runs
from tests.exporting.test_card import card
from tests.reporting.synthetic import DEVICES, Made, finals, searched, write_comparison, write_run, write_search

pytestmark = pytest.mark.slow
ARTEFACTS = Path(__file__).parents[2] / "artefacts"
BROWSER_OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
PACKAGES = {"chromium": "chromium", "chromedriver": "chromium-driver"}


def programs() -> dict[str, str]:
    """Paths of the browser and its driver, installed if possible."""
    paths = {name: shutil.which(name) for name in PACKAGES}
    if not all(paths.values()) and shutil.which("apt-get") and os.geteuid() == 0:
        for command in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES.values()]):
            subprocess.run(["apt-get", *command], check=False, capture_output=True, timeout=600)
        paths = {name: shutil.which(name) for name in PACKAGES}
    missing = [PACKAGES[name] for name, path in paths.items() if not path]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)} here, and none could be installed")
    return {name: str(path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    paths, options = programs(), webdriver.ChromeOptions()
    options.binary_location = paths["chromium"]
    for one in BROWSER_OPTIONS:
        options.add_argument(one)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('browser')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(paths["chromedriver"]))
    yield driver
    driver.quit()


@pytest.fixture(params=["run", "comparison", "text"])
def shown(request: pytest.FixtureRequest, browser: Any, pages: dict[str, Page], tmp_path: Path) -> tuple[str, Any]:
    pages[request.param].write(tmp_path / "report.html")
    look(browser, 1280, "light")
    browser.get((tmp_path / "report.html").as_uri())
    return request.param, browser


def look(browser: Any, width: int, scheme: str, height: int = 900) -> None:
    features = [
        {"name": "prefers-color-scheme", "value": scheme},
        {"name": "prefers-reduced-motion", "value": "reduce"},
    ]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def visible(browser: Any, selector: str) -> list[Any]:
    return [one for one in browser.find_elements("css selector", selector) if one.is_displayed()]


def errors(browser: Any) -> list[str]:
    return [one["message"] for one in browser.get_log("browser")]


def open_all(browser: Any) -> None:
    browser.find_element("id", "open-all").click()


def bottom(browser: Any, selector: str) -> float:
    script = "return document.querySelector(arguments[0]).getBoundingClientRect().bottom"
    return float(browser.execute_script(script, selector))


def test_first_screen_has_sentence_numbers_and_chart(shown: tuple[str, Any]) -> None:
    _, browser = shown
    look(browser, 1300, "light")
    assert errors(browser) == []
    assert browser.find_element("css selector", "h1").text.endswith(".")
    assert 3 <= len(visible(browser, ".tile")) <= 5
    assert visible(browser, ".heroes .panel svg")
    assert 0 < bottom(browser, "h1") < bottom(browser, ".tiles") < bottom(browser, ".heroes .panels") <= 900


def test_page_in_browser_shows_every_chart_without_errors(shown: tuple[str, Any], pages: dict[str, Page]) -> None:
    name, browser = shown
    open_all(browser)
    keys = {key.removesuffix(".csv") for key in pages[name].csvs} - {"tiers"}
    figures = visible(browser, "section.figure, figure.hero")
    assert {one.get_attribute("id") for one in figures} == keys
    for figure in figures:
        pictures = figure.find_elements("css selector", ".panel svg")
        assert pictures and all(one.size["width"] > 100 and one.size["height"] > 40 for one in pictures)
        assert figure.find_element("css selector", ".sentence, figcaption .note").text
    assert len(visible(browser, "#tier-table tbody tr")) >= 2
    assert errors(browser) == []


def test_sections_open_by_click_and_by_link(shown: tuple[str, Any]) -> None:
    _, browser = shown
    assert not visible(browser, "#participation")
    browser.find_element("css selector", "#section-health > summary").click()
    assert visible(browser, "#participation")
    assert not visible(browser, "#uploads")
    browser.execute_script("location.hash = 'uploads'")
    assert visible(browser, "#uploads")


@pytest.mark.parametrize("width", [360, 500, 1300])
def test_page_at_any_width_does_not_overflow(shown: tuple[str, Any], width: int) -> None:
    _, browser = shown
    open_all(browser)
    look(browser, width, "light")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


def test_page_toggles_by_mouse_and_keyboard_hide_tiers_and_arms(shown: tuple[str, Any]) -> None:
    from selenium.webdriver.common.keys import Keys

    name, browser = shown
    open_all(browser)
    marks = "#tier-table tr, .panel, .panel g"
    before = len(visible(browser, "#tier-table tbody tr"))
    box = browser.find_element("css selector", 'input[name="tier"][value="small"]')
    box.click()
    assert {one.get_attribute("data-tier") for one in visible(browser, "#tier-table tbody tr")} == {"large"}
    assert not visible(browser, '.panel [data-tier="small"], .panel[data-tier="small"]')
    assert visible(browser, '.panel [data-tier="large"], .panel[data-tier="large"]')
    box.send_keys(Keys.SPACE)
    assert len(visible(browser, "#tier-table tbody tr")) == before and visible(browser, marks)
    if name == "comparison":
        browser.find_element("css selector", 'input[name="arm"][value="fjord"]').click()
        assert not visible(browser, '[data-arm="fjord"]')
        assert visible(browser, '[data-arm="heterofl"]')


def test_page_hover_and_arrow_keys_show_values(shown: tuple[str, Any]) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    _, browser = shown
    open_all(browser)
    look(browser, 1300, "light")
    chart = browser.find_element("css selector", "#learning_rounds .panel svg")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    ActionChains(browser).move_to_element(chart).perform()
    tip = browser.find_element("css selector", ".tip")
    assert tip.is_displayed() and tip.text.startswith("round ") and "\n" in tip.text
    ActionChains(browser).move_to_element(browser.find_element("css selector", "h1")).perform()
    assert not tip.is_displayed()
    chart.send_keys(Keys.HOME)
    assert tip.text.startswith("round 1\n")
    chart.send_keys(Keys.ARROW_RIGHT)
    assert tip.text.startswith("round 2\n")
    cell = browser.find_element("css selector", "#participation .cell")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", cell)
    ActionChains(browser).move_to_element(cell).perform()
    assert tip.text.endswith(("admitted", "silent", "refused", "late"))
    assert errors(browser) == []


def test_page_brush_and_numbers_narrow_the_rounds(shown: tuple[str, Any]) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    _, browser = shown
    look(browser, 1300, "light")
    open_all(browser)
    chart = browser.find_element("css selector", "#learning_rounds .panel svg")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    points = "return document.querySelector('#learning_rounds polyline[data-v]').getAttribute('points')"
    whole = browser.execute_script(points)
    ActionChains(browser).move_to_element_with_offset(chart, -10, 0).click_and_hold().move_by_offset(
        60, 0
    ).release().perform()
    assert browser.execute_script(points) != whole
    ActionChains(browser).double_click(chart).perform()
    assert browser.execute_script(points) == whole
    field = browser.find_element("css selector", 'input[name="from"]')
    field.clear()
    field.send_keys("2\t")
    assert browser.execute_script(points) != whole
    assert errors(browser) == []


def test_page_first_tab_stop_leads_to_finding(shown: tuple[str, Any]) -> None:
    from selenium.webdriver.common.keys import Keys

    _, browser = shown
    browser.find_element("css selector", "body").send_keys(Keys.TAB)
    first = browser.switch_to.active_element
    assert first.get_attribute("class") == "skip" and first.is_displayed()
    first.send_keys(Keys.ENTER)
    assert browser.current_url.endswith("#finding")


def test_page_without_script_shows_first_screen_and_opens_sections(
    browser: Any, pages: dict[str, Page], tmp_path: Path
) -> None:
    pages["comparison"].write(tmp_path / "report.html")
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        look(browser, 1300, "light")
        browser.get((tmp_path / "report.html").as_uri())
        assert visible(browser, "h1") and visible(browser, ".heroes .panel svg")
        assert not visible(browser, "#toolbar")
        browser.find_element("css selector", "#section-learning > summary").click()
        assert visible(browser, "#learning_rounds .panel svg")
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core: the file that AXE_CORE names, or npm's."""
    named = os.environ.get("AXE_CORE")
    if named:
        return Path(named).read_text("utf-8")
    npm = shutil.which("npm")
    if not npm:
        pytest.skip("neither AXE_CORE nor npm here")
    folder = tmp_path_factory.mktemp("axe")
    made = subprocess.run([npm, "pack", "axe-core"], cwd=folder, capture_output=True, timeout=120, check=False)
    packages = list(folder.glob("axe-core-*.tgz"))
    if made.returncode or not packages:
        pytest.skip("npm cannot get axe-core here")
    with tarfile.open(packages[0]) as package:
        member = package.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode("utf-8")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_has_no_serious_accessibility_violation(shown: tuple[str, Any], axe: str, scheme: str) -> None:
    _, browser = shown
    look(browser, 1300, scheme)
    open_all(browser)
    assert violations(browser, axe) == []


def violations(browser: Any, axe: str) -> list[str]:
    """Serious and critical ones of the page that is open."""
    browser.execute_script(axe)
    browser.set_script_timeout(60)
    result = browser.execute_async_script("const done = arguments[0]; axe.run().then(done)")
    assert len(result["passes"]) > 10
    return [
        f"{one['id']}: {[node['target'] for node in one['nodes']][:3]}"
        for one in result["violations"]
        if one["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_gallery_and_card_have_no_serious_accessibility_violation(
    browser: Any, axe: str, tmp_path: Path, scheme: str
) -> None:
    write_run(tmp_path / "one", Made({"large": [50.0, 60.0], "small": [40.0, 50.0]}))
    (tmp_path / "gallery.html").write_text(build_gallery(tmp_path, list_runs(tmp_path)), "utf-8")
    (tmp_path / "card.html").write_text(as_html(card()), "utf-8")
    look(browser, 1300, scheme)
    for name, heading in (("gallery", "All runs in"), ("card", "convnet of tier <small>")):
        browser.get((tmp_path / f"{name}.html").as_uri())
        assert browser.find_element("css selector", "h1").text.startswith(heading)
        assert violations(browser, axe) == [] and errors(browser) == []


def test_page_of_twenty_arms_and_five_seeds_opens_within_a_second(browser: Any, tmp_path: Path) -> None:
    def run(arm: int, seed: int) -> Made:
        values = {tier: [50 + arm + seed + number for number in range(20)] for tier in ("large", "small")}
        own = {name: 60.0 + arm + at for at, name in enumerate(DEVICES)}
        return Made(values, method=f"method{arm}", local=values, devices=own)

    arms = {f"method{arm}": [run(arm, seed) for seed in range(5)] for arm in range(20)}
    page = build_page(read_report_data([write_comparison(tmp_path / "home", arms)]))
    assert len(page.html.encode()) < 3_000_000
    page.write(tmp_path / "report.html")
    look(browser, 1300, "light")
    browser.get("about:blank")
    browser.get((tmp_path / "report.html").as_uri())
    timing = "const t = performance.getEntriesByType('navigation')[0]; return t.loadEventEnd - t.startTime"
    assert browser.execute_script(timing) <= 1000
    assert "method19 is best on large and small devices" in browser.find_element("css selector", "h1").text
    assert bottom(browser, ".heroes .panels") <= 900
    assert errors(browser) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_search_page_and_section_in_browser(browser: Any, axe: str, tmp_path: Path, scheme: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    trials = ({1: 10.0}, {1: 30.0, 3: 40.0, 9: 60.0}, {1: 20.0, 3: 35.0})
    searches = [searched("heterofl", trials), searched("fjord", ({1: 50.0, 9: 55.0}, {1: 45.0, 9: 50.0}))]
    home = write_comparison(tmp_path / "home", {arm: [finals(80, 60)] for arm in ("heterofl", "fjord")})
    write_search(home / "tune", searches)
    for name, folder in (("tuned", home), ("search", home / "tune")):
        build_report([folder]).write(tmp_path / f"{name}.html")
        look(browser, 1300, scheme)
        browser.get((tmp_path / f"{name}.html").as_uri())
        assert 0 < bottom(browser, "h1") < bottom(browser, ".tiles") < bottom(browser, ".heroes .panels") <= 900
        browser.execute_script("document.getElementById('section-search').open = true")
        assert len(visible(browser, "#search-table tbody tr")) == 2
        mark = browser.find_element("css selector", '#search_settings .dot[data-arm="heterofl"]')
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", mark)
        ActionChains(browser).move_to_element(mark).perform()
        assert browser.find_element("css selector", ".tip").text.startswith("heterofl, trial 0 with lr 0.1: 10.0 %")
        browser.find_element("css selector", 'input[name="arm"][value="fjord"]').click()
        assert (
            len(visible(browser, "#search-table tbody tr")) == 1 and len(visible(browser, "#search_stages .panel")) == 1
        )
        assert violations(browser, axe) == [] and errors(browser) == []


def test_live_page_updates_in_place_and_keeps_what_is_open(browser: Any, tmp_path: Path) -> None:
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.support.ui import WebDriverWait

    def page(rounds: int, status: str) -> Page:
        values = {tier: [50.0 + number for number in range(rounds)] for tier in ("large", "small")}
        made = Made(values, status=status, rounds=9)
        return build_page(read_report_data([write_run(tmp_path / f"{rounds}{status}", made)]), refresh=0.2)

    server = LiveServer()
    try:
        server.show(page(3, "running"))
        look(browser, 1300, "light")
        browser.get(server.address)
        assert browser.find_element("css selector", "h1").text.startswith("So far, after 3 of 9 rounds")
        browser.find_element("css selector", "#section-health > summary").click()
        browser.find_element("css selector", 'input[name="tier"][value="small"]').click()
        browser.execute_script("window.kept = true")
        server.show(page(5, "running"))
        wait = WebDriverWait(browser, 10, ignored_exceptions=[StaleElementReferenceException])
        wait.until(lambda one: "5 of 9 rounds" in one.find_element("css selector", "h1").text)
        assert browser.execute_script("return window.kept") is True  # the page was not loaded again
        assert visible(browser, "#participation") and not visible(browser, '.panel [data-tier="small"]')
        server.show(page(9, "finished"))
        wait.until(lambda one: one.find_element("css selector", "h1").text.startswith("heterofl reaches"))
        assert not visible(browser, ".live") and errors(browser) == []
    finally:
        server.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_in_both_color_schemes_is_captured(shown: tuple[str, Any], scheme: str) -> None:
    name, browser = shown
    look(browser, 1280, scheme)
    open_all(browser)
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 22, 26)"}[scheme]
    height = browser.execute_script("return document.documentElement.scrollHeight")
    look(browser, 1280, scheme, height)
    ARTEFACTS.mkdir(exist_ok=True)
    assert browser.get_screenshot_as_file(str(ARTEFACTS / f"report_{name}_{scheme}.png"))


def test_page_prints_all_sections(shown: tuple[str, Any]) -> None:
    name, browser = shown
    printed = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    ARTEFACTS.mkdir(exist_ok=True)
    (ARTEFACTS / f"report_{name}.pdf").write_bytes(printed)
    assert printed.startswith(b"%PDF") and len(re.findall(rb"/Type\s*/Page\b", printed)) >= 2
