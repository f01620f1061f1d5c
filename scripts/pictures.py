"""Make the pictures of the README and the documentation: real runs of committed recipes, seen by a real browser.

    python scripts/pictures.py [--runs FOLDER] [NAME ...]

Needs Debian's `chromium` and `chromium-driver`, and selenium and Pillow as in the extra `dev`. Runs that FOLDER has
already are not repeated. NAMEs are first_run, personalized, six_arms, live, gallery and all_methods; default: all.
"""

import argparse
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedloom.design import stylesheet
from fedloom.reporting.charts.drawing import Axis, Dot, Key, Panel, render_svg, row_height, swatch
from fedloom.reporting.charts.looks import shade_of
from fedloom.reporting.page import read_resource

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
SIX = [
    "--methods", "fjord,fedrolex", "--controls", "standalone,small-for-all,drop-the-small",
    "--set", "data.dataset=digits", "--set", "model.hidden=[16, 32]", "--set", "rounds=8",
]  # fmt: skip
COMMANDS = {  # what each folder of runs is made by
    "first_run": ["run"],
    "personalized": ["run", "recipes/personalized_digits.toml"],
    "six_arms": ["compare", "recipes/starter.toml", "--seeds", "2", *SIX],
    "live": ["run", "recipes/starter.toml"],
}
VIEWS = {  # width, height, color scheme and medium of a picture
    "1300": (1300, 900, "light", ""),
    "500": (500, 1100, "light", ""),
    "dark": (1300, 900, "dark", ""),
    "print": (794, 1123, "light", "print"),
}
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
COLORS = 256  # of a picture: enough for text and charts, and a tenth of the bytes


@contextmanager
def open_browser() -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    if not all(programs.values()):
        sys.exit("this needs Debian's packages chromium and chromium-driver")
    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = str(programs["chromium"])
        for option in (*OPTIONS, f"--user-data-dir={profile}"):
            options.add_argument(option)
        browser = webdriver.Chrome(options=options, service=Service(programs["chromedriver"]))
        try:
            yield browser
        finally:
            browser.quit()


def look(browser: Any, view: str, height: int | None = None) -> None:
    width, usual, scheme, medium = VIEWS[view]
    features = [
        {"name": "prefers-color-scheme", "value": scheme},
        {"name": "prefers-reduced-motion", "value": "reduce"},
    ]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features, "media": medium})
    size = {"width": width, "height": height or usual, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def capture(browser: Any, name: str) -> None:
    picture = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    file = IMAGES / f"{name}.png"
    reduce_colors(picture).save(file, optimize=True)
    sys.stdout.write(
        f"{file.relative_to(ROOT)}  {picture.width} x {picture.height}, {file.stat().st_size // 1000} kB\n"
    )


def show_page(browser: Any, view: str, address: str) -> None:
    look(browser, view)
    browser.get(address)
    if VIEWS[view][3] == "print":  # the margins of a sheet, which a screenshot does not have
        browser.execute_script("document.body.style.padding = '14mm'")


def reduce_colors(picture: Image.Image) -> Image.Image:
    """The picture in few of its own colors: bright ones first, which marks have, then the most frequent ones.

    An average of colors, as usual, would give marks another hue than the page does.
    """
    pixels = np.asarray(picture).reshape(-1, 3)
    colors, which, counts = np.unique(pixels, axis=0, return_inverse=True, return_counts=True)
    is_bright = np.ptp(colors.astype(int), axis=1) > 60
    by_count = np.argsort(-counts, kind="stable")
    bright = [at for at in by_count if is_bright[at]][: COLORS // 2]
    kept = colors[[*bright, *[at for at in by_count if at not in set(bright)][: COLORS - len(bright)]]]
    distances = np.abs(colors[:, None].astype(int) - kept[None].astype(int)).sum(axis=2)
    indices = distances.argmin(axis=1)[which.reshape(-1)].astype(np.uint8)
    reduced = Image.fromarray(indices.reshape(picture.height, picture.width), "P")
    reduced.putpalette(kept.astype(np.uint8).tobytes())
    return reduced


def fedloom(*words: str) -> list[str]:
    return [sys.executable, "-m", "fedloom", *words]


def make_run(runs: Path, name: str) -> Path:
    """The folder of the runs that a picture shows, made unless it is there."""
    folder = runs / name
    if not (folder / "report.html").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run(fedloom(*COMMANDS[name], "--out", str(folder), "--quiet"), cwd=ROOT, check=True)
    subprocess.run(fedloom("report", str(folder)), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


def show_report(browser: Any, runs: Path, name: str) -> None:
    page = make_run(runs, name) / "report.html"
    for view in VIEWS:
        show_page(browser, view, page.resolve().as_uri())
        capture(browser, f"report_{name}_{view}")


def show_live(browser: Any, runs: Path, name: str) -> None:
    """A run that goes on, from the server of `report --watch`."""
    folder = runs / name
    shutil.rmtree(folder, ignore_errors=True)
    with subprocess.Popen(fedloom(*COMMANDS[name], "--out", str(folder), "--quiet", "--no-report"), cwd=ROOT) as run:
        try:
            wait_for(lambda: _rounds(folder) >= 4)
            command = fedloom("report", str(folder), "--watch", "--every", "1")
            with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as watcher:
                assert watcher.stderr is not None
                address = watcher.stderr.readline().split()[0]
                for view in VIEWS:
                    show_page(browser, view, address)
                    capture(browser, f"report_{name}_{view}")
                watcher.terminate()
        finally:
            run.terminate()


def _rounds(folder: Path) -> int:
    rows = folder / "rows.jsonl"
    return (
        max((json.loads(line)["round"] for line in rows.read_text().splitlines()), default=0) if rows.is_file() else 0
    )


def wait_for(done: Callable[[], bool], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not done():
        if time.monotonic() > until:
            sys.exit("the run did not get on")
        time.sleep(0.1)


def show_gallery(browser: Any, runs: Path, name: str) -> None:
    for run in ("first_run", "personalized", "six_arms"):
        make_run(runs, run)
    subprocess.run(fedloom("list", "runs", str(runs), "--html"), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    look(browser, "1300")
    browser.get((runs / "index.html").resolve().as_uri())
    capture(browser, name)


PERSONAL = ("standalone", "ditto")  # arms whose models are for the devices' own data, not for the global test


def show_all_methods(browser: Any, runs: Path, name: str) -> None:
    """The tables of the results page as charts; the tables are the measurement."""
    section = (ROOT / "docs" / "results.md").read_text("utf-8").partition("## All methods, each with settings")[2]
    settings = re.findall(r"\n### (.+?)\n\n(\| arm .+?)(?=\n\n)", section.partition("\n## ")[0], re.DOTALL)
    looks = {"large devices": shade_of(0), "medium devices": shade_of(1), "small devices": shade_of(2)}

    def panel(title: str, table: str) -> str:
        lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "±" in line)
        rows = [cells for cells in lines if cells[0] not in PERSONAL]
        marks = []
        for row, cells in enumerate(rows):
            for at, style in enumerate(looks.values()):
                if "±" in cells[at + 1]:
                    mean, spread = map(float, cells[at + 1].split("±"))
                    marks.append(Dot(mean, row + 0.26 * (at - 1), style, spread=spread, size=4.0))
        axis = Axis("accuracy, % (mean and standard deviation over five seeds)")
        names = Axis(names=[cells[0] for cells in rows])
        drawn = Panel(title, marks, axis, names, width=480, height=row_height(len(rows), 20))
        return f'<div class="panel"><h3 class="panel-title">{title}</h3>{render_svg(drawn, f"p{len(title)}")}</div>'

    keys = "".join(f"<li>{swatch(Key(tier, style, 'point'))}{tier}</li>" for tier, style in looks.items())
    panels = "".join(panel(title, table) for title, table in settings)
    css = stylesheet() + read_resource("page.css")
    page = (
        f'<!doctype html><meta charset="utf-8"><style>{css}</style><h1>Methods with searched settings on one fleet</h1>'
        f'<ul class="legend">{keys}</ul><div class="panels several">{panels}</div>'
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(page, encoding="utf-8")
        look(browser, "1300", 640)
        browser.get(file.as_uri())
        capture(browser, name)


PICTURES: dict[str, Callable[[Any, Path, str], None]] = {
    "first_run": show_report,
    "personalized": show_report,
    "six_arms": show_report,
    "live": show_live,
    "gallery": show_gallery,
    "all_methods": show_all_methods,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *PICTURES], default=[])
    parser.add_argument("--runs", type=Path, help="keep the runs here")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, open_browser() as browser:
        runs = chosen.runs or Path(temporary)
        runs.mkdir(parents=True, exist_ok=True)
        for name in chosen.names or PICTURES:
            PICTURES[name](browser, runs, name)


if __name__ == "__main__":
    main()
