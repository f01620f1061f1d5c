"""The page: valid, self-contained, small and accessible."""

import json
import re
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from fedloom.design import css_variables
from fedloom.reporting.page import Page, build_page
from fedloom.reporting.report_data import ReportError, read_report_data
from fedloom.reporting.summary import write_sentences
from tests.reporting.synthetic import finals, write_comparison

VOID = {"meta", "input", "br", "link", "img"}
LIMIT = 3_000_000


class Reader(HTMLParser):
    """Collects all tags, those still open, and those closed in the wrong order."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    return reader


@pytest.fixture(params=["run", "comparison", "text"])
def built(request: pytest.FixtureRequest, pages: dict[str, Page]) -> Page:
    return pages[request.param]


def test_page_tags_are_closed(built: Page) -> None:
    reader = read(built.html)
    assert (reader.wrong, reader.open) == ([], [])
    assert built.html.startswith("<!doctype html>")


def test_page_has_no_external_references(built: Page) -> None:
    assert not re.search(r"https?://|//\w+\.", built.html)
    references = [value for _, marks in read(built.html).seen for key, value in marks.items() if key in ("src", "href")]
    assert all(value and value.startswith(("#", "data:", "figures/")) for value in references)
    assert "@import" not in built.html


def test_page_headline_keeps_names_whole(tmp_path: Path) -> None:
    arms = {"heterofl": [finals(60, 60)], "fjord": [finals(50, 50)], "small-for-all": [finals(90, 90)]}
    html = build_page(read_report_data([write_comparison(tmp_path / "home", arms)])).html
    assert (
        '<h1 id="finding-title"><span class="whole">small-for-all</span> is best on large and small devices.</h1>'
        in html
    )


def test_page_size_is_small(built: Page) -> None:
    assert len(built.html.encode()) < LIMIT / 4


def test_page_ids_are_unique_and_defined(built: Page) -> None:
    names = Counter(marks["id"] for _, marks in read(built.html).seen if "id" in marks)
    assert names and max(names.values()) == 1
    references = re.findall(r'aria-labelledby="([^"]+)"|href="#([^"]+)"|url\(#([^)]+)\)', built.html)
    assert {next(filter(None, one)) for one in references} <= names.keys()


def test_page_charts_have_text_alternatives(built: Page) -> None:
    seen = read(built.html).seen
    pictures = [(at, marks) for at, (tag, marks) in enumerate(seen) if tag == "svg"]
    assert len(pictures) > 5
    for at, marks in pictures:
        if marks.get("aria-hidden") == "true":
            continue
        assert marks["role"] == "img"
        assert seen[at + 1][0] == "title" and seen[at + 1][1]["id"] == marks["aria-labelledby"]
    assert not any(tag == "img" for tag, _ in seen)


def test_page_tables_have_captions_and_headers(built: Page) -> None:
    tags = [tag for tag, _ in read(built.html).seen]
    assert tags.count("table") == tags.count("caption") == tags.count("thead")
    assert all(marks.get("scope") in ("col", "row") for tag, marks in read(built.html).seen if tag == "th")


def test_page_headings_descend_by_one_level(built: Page) -> None:
    levels = [int(tag[1]) for tag, _ in read(built.html).seen if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_page_is_usable_by_keyboard(built: Page) -> None:
    seen = read(built.html).seen
    assert next(marks["href"] for tag, marks in seen if tag == "a") == "#finding"
    choices = [marks["value"] for tag, marks in seen if tag == "input" and marks.get("name") == "tier"]
    assert choices == ["large", "small"]
    assert all(rule in built.html for rule in ("prefers-color-scheme: dark", "@media print", ":focus-visible"))


def test_page_charts_use_colors_of_the_page(built: Page) -> None:
    pictures = "".join(re.findall(r"<svg.*?</svg>", built.html, flags=re.DOTALL))
    assert re.search(r"var\(--[at]0\)", pictures)
    assert not re.search(r"#[0-9a-fA-F]{6}\b|rgb\(", pictures)
    defined = set(css_variables())
    assert set(re.findall(r"var\((--\w+)\)", pictures)) <= defined


def test_page_csv_files_are_written_and_linked(built: Page, tmp_path: Path) -> None:
    built.write(tmp_path / "report.html")
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == sorted(built.csvs)
    for name in built.csvs:
        assert f'download="{name}"' in built.html


def test_page_in_shared_folder_has_its_own_figures(pages: dict[str, Page], tmp_path: Path) -> None:
    pages["run"].write(tmp_path / "one.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one-figures", "one.html"]


def test_page_of_same_run_is_identical(text: Path, pages: dict[str, Page]) -> None:
    assert build_page(read_report_data([text])).html == pages["text"].html


def test_page_shows_command_and_fingerprint(run: Path, pages: dict[str, Page]) -> None:
    assert f"fedloom run {run / 'recipe.toml'}" in pages["run"].html
    assert json.loads((run / "manifest.json").read_text())["sha256"] in pages["run"].html


def test_page_of_running_experiment_reloads_itself(run: Path, tmp_path: Path) -> None:
    for path in run.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    message = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**message, "status": "running"}))
    rows = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(line for line in rows if '"round": 4' not in line))
    html = build_page(read_report_data([tmp_path])).html
    assert "In progress: 3 of 4 rounds finished" in html and 'http-equiv="refresh"' in html
    assert "So far, after 3 of 4 rounds" in html


def test_sentences_of_run_with_void_round_mention_it_once(run: Path, tmp_path: Path) -> None:
    for path in run.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"round": 2, "device": "", "code": "QUORUM", "reason": "too few"}\n')
    sentences = write_sentences(read_report_data([tmp_path]))
    assert sentences.count("1 round did not count: too few replies.") == 1
    assert not any("did not count" in line for line in write_sentences(read_report_data([run])))


def test_page_of_large_fleet_stays_within_size_limit(run: Path, tmp_path: Path) -> None:
    devices, rounds = [f"{number:04d}" for number in range(1500)], range(1, 101)
    for name in ("manifest.json", "recipe.toml"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    fleet = json.loads((run / "fleet.json").read_text())
    held = {"classes": [str(one) for one in range(100)], "counts": [[1] * 100] * len(devices)}
    tiers = ["large", "small"] * (len(devices) // 2)
    (tmp_path / "fleet.json").write_text(
        json.dumps({**fleet, "devices": devices, "device_tiers": tiers, "holdings": held})
    )
    line = {
        "tier": "large",
        "outcome": "admitted",
        "devices": devices[:400],
        "bytes_down": 10,
        "bytes_up": {"weights": 8},
    }
    (tmp_path / "participation.jsonl").write_text("".join(json.dumps({"round": one, **line}) + "\n" for one in rounds))
    row = {"candidate": "server", "tier": "large", "test": "local", "metric": "accuracy"}
    lines = [{**row, "round": one, "device": "", "test": "global", "value": one / 2} for one in rounds]
    lines += [{**row, "round": 100, "device": name, "value": 50.0} for name in devices[::2]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert len(build_page(read_report_data([tmp_path])).html.encode()) < LIMIT


def test_report_data_of_several_runs_has_an_arm_per_recipe(compared: Path) -> None:
    names = ("heterofl", "fjord")
    folders = [compared / arm / f"seed-{seed}" for arm in names for seed in (0, 1)]
    report = read_report_data(folders)
    assert [group.name for group in report.groups] == list(names)
    assert [len(group.readers) for group in report.groups] == [2, 2]
    assert report.result is not None


def test_report_data_of_several_seeds_is_one_arm(compared: Path) -> None:
    report = read_report_data([compared / "heterofl" / f"seed-{seed}" for seed in (1, 0)])
    assert [reader.seed for reader in report.groups[0].readers] == [0, 1]
    assert "mean over 2 seeds" in write_sentences(report)[0]


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["heterofl/seed-0", "heterofl/seed-0"], "named twice"),
        (["heterofl/seed-0", "."], "cannot be combined"),
        (["heterofl"], "not the folder of a run"),
    ],
)
def test_report_data_of_unpaired_runs_is_refused(compared: Path, folders: list[str], message: str) -> None:
    with pytest.raises(ReportError, match=message):
        read_report_data([compared / folder for folder in folders])
