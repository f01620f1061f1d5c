"""The page in a real browser: complete, without errors, with selectable tiers. Saves screenshots."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedloom.reporting.page import Page

pytestmark = pytest.mark.slow
ARTEFACTS = Path(__file__).parents[2] / "artefacts"
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
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    paths, options = programs(), webdriver.ChromeOptions()
    options.binary_location = paths["chromium"]
    for one in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(one)
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
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def visible(browser: Any, selector: str) -> list[Any]:
    return [one for one in browser.find_elements("css selector", selector) if one.is_displayed()]


def test_page_in_browser_shows_every_chart_without_errors(shown: tuple[str, Any], pages: dict[str, Page]) -> None:
    name, browser = shown
    assert [one["message"] for one in browser.get_log("browser")] == []
    figures = visible(browser, "section.figure")
    assert {one.get_attribute("id") for one in figures} == {key.removesuffix(".csv") for key in pages[name].csvs} - {
        "tiers"
    }
    for figure in figures:
        pictures = figure.find_elements("css selector", ".panel svg")
        assert pictures and all(one.size["width"] > 100 and one.size["height"] > 40 for one in pictures)
        assert figure.find_element("css selector", ".sentence").text
    assert len(visible(browser, "#tier-table tbody tr")) >= 2


@pytest.mark.parametrize("width", [360, 1280])
def test_page_at_any_width_does_not_overflow(shown: tuple[str, Any], width: int) -> None:
    _, browser = shown
    look(browser, width, "light")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


def test_page_tier_selection_by_mouse_and_keyboard_hides_other_tiers(shown: tuple[str, Any]) -> None:
    from selenium.webdriver.common.keys import Keys

    _, browser = shown
    both = len(visible(browser, "#tier-table tbody tr"))
    browser.find_element("css selector", 'input[name="tier"][value="large"]').click()
    assert {one.get_attribute("data-tier") for one in visible(browser, "#tier-table tbody tr")} == {"large"}
    assert visible(browser, '.panel [data-tier="large"], .panel[data-tier="large"]')
    assert not visible(browser, '.panel [data-tier="small"], .panel[data-tier="small"]')
    browser.switch_to.active_element.send_keys(Keys.ARROW_DOWN)
    assert {one.get_attribute("data-tier") for one in visible(browser, "#tier-table tbody tr")} == {"small"}
    browser.find_element("css selector", 'input[name="tier"][value=""]').click()
    assert len(visible(browser, "#tier-table tbody tr")) == both


def test_page_first_tab_stop_leads_to_verdict(shown: tuple[str, Any]) -> None:
    from selenium.webdriver.common.keys import Keys

    _, browser = shown
    browser.find_element("css selector", "body").send_keys(Keys.TAB)
    first = browser.switch_to.active_element
    assert first.get_attribute("class") == "skip" and first.is_displayed()
    first.send_keys(Keys.ENTER)
    assert browser.current_url.endswith("#verdict")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_in_both_color_schemes_is_captured(shown: tuple[str, Any], scheme: str) -> None:
    name, browser = shown
    look(browser, 1280, scheme)
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 24, 28)"}[scheme]
    height = browser.execute_script("return document.documentElement.scrollHeight")
    look(browser, 1280, scheme, height)
    ARTEFACTS.mkdir(exist_ok=True)
    assert browser.get_screenshot_as_file(str(ARTEFACTS / f"report_{name}_{scheme}.png"))
