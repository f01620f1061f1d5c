"""fedloom reproduce: rows and claims of a ledger that runs in seconds, and the project's own lists."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedloom.reporting.ledger import FULL_SIZE_START, SECTION_END, SECTION_START
from fedloom.runs.folder import read_manifest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ROWS = """
paper = "Own"
levels = { large = 1.0 }

[choices]
short = ["rounds=1"]

[[tables]]
name = "own_table1"
source = "Table 1"
recipe = "my.toml"
numbers = [{ tier = "large" }, { tier = "small", selection = "best" }]
rows = { "short" = [90.5, "-"] }

[[tables]]
name = "own_table2"
source = "Table 2"
recipe = "my.toml"
numbers = [{ tier = "large", metric = "parameters", selection = "cost" }]
rows = { "short" = [1000] }
"""
CLAIMS = """
seeds = 2

[[claims]]
name = "masked-like-unmasked"
paper = "Own"
statement = "With all labels everywhere the mask changes nothing."
published = "90.5 against 90.5"
recipe = "my.toml"
this = { arm = "heterofl", tier = "large" }
other = { arm = "unmasked", tier = "large" }
relation = "at least"

[[claims]]
name = "sooner"
paper = "Own"
statement = "Large ones are there sooner."
published = "1 against 2 rounds"
recipe = "my.toml"
this = { arm = "heterofl", tier = "large" }
other = { arm = "heterofl", tier = "small" }
measure = "rounds"
relation = "less"
baseline = { arm = "unmasked" }

[[claims]]
name = "elsewhere"
paper = "Own"
statement = "Decided by another comparison."
published = "-"
recipe = "other.toml"
this = { arm = "heterofl" }
other = { arm = "unmasked" }
"""
ARMS = '\n[compare.arms]\nunmasked = ["method.mask_unseen_labels=false"]\n'


@pytest.fixture
def ledger(write, tmp_path):
    """A folder of recipes with their lists; returns the options that name it."""
    home = tmp_path / "own"
    (home / "ledger").mkdir(parents=True)
    (home / "ledger" / "own.toml").write_text(ROWS)
    (home / "ledger" / "claims.toml").write_text(CLAIMS)
    for name in ("my.toml", "other.toml"):
        write(to=name).rename(home / name)
        (home / name).write_text((home / name).read_text() + ARMS)
    return ["--recipes", "own", "--runs", "runs", "--results", "docs/results.json"]


def test_reproduce_row_shows_published_and_measured(ledger, fedloom, tmp_path):
    done = fedloom("reproduce", "own_table1_short", *ledger, "--quiet", "--format", "json")
    assert done.code == 0
    assert (done.data["run"], done.data["source"]) == ("runs/own_table1_short", "Own, Table 1")
    large, small = done.data["numbers"]
    assert large["published"] == 90.5 and 0 <= large["measured"] <= 100
    assert small["published"] is None
    assert large["what"] == "large accuracy, global, last"
    rows = (tmp_path / "runs/own_table1_short/rows.jsonl").read_bytes()
    again = fedloom("reproduce", "own_table1_short", *ledger)
    assert again.code == 0 and again.err == ""  # nothing is run twice
    assert "90.5" in again.out and "run: runs/own_table1_short" in again.out
    assert (tmp_path / "runs/own_table1_short/rows.jsonl").read_bytes() == rows


def test_reproduce_table_runs_all_of_its_rows(ledger, fedloom, tmp_path):
    table = ROWS.replace('"short" = [90.5, "-"]', '"short" = [90.5, "-"], "short thrice" = [80, 70]')
    (tmp_path / "own" / "ledger" / "own.toml").write_text(
        table.replace("short = [", 'thrice = ["seed=3"]\nshort = [', 1)
    )
    done = fedloom("reproduce", "own_table1", *ledger, "--quiet", "--format", "json")
    data = json.loads(done.out)["data"]
    assert (data["table"], [row["row"] for row in data["rows"]]) == (
        "own_table1",
        ["own_table1_short", "own_table1_short_thrice"],
    )
    assert [[number["published"] for number in row["numbers"]] for row in data["rows"]] == [[90.5, None], [80, 70]]
    assert all(number["measured"] is not None for row in data["rows"] for number in row["numbers"])
    alone = fedloom("reproduce", "own_table1_short", *ledger, "--quiet", "--format", "json")  # is not run again
    assert json.loads(alone.out)["data"]["numbers"] == data["rows"][0]["numbers"]
    text = fedloom("reproduce", "own_table1", *ledger)
    assert "own_table1_short_thrice" in text.out and "published" in text.out


def test_reproduce_row_with_changes_has_its_own_folder(ledger, fedloom, tmp_path):
    done = fedloom("reproduce", "own_table1_short", *ledger, "--set", "data.devices=6", "--quiet", "--format", "json")
    assert done.code == 0
    assert done.data["run"].startswith("runs/own_table1_short+")
    assert not (tmp_path / "runs/own_table1_short").exists()


def test_reproduce_full_writes_rows_to_the_ledger(ledger, fedloom, tmp_path):
    """One entry for each number, over its seeds; what is finished is not run again."""
    done = fedloom("reproduce", "own_table1_short", "--full", "--seeds", "2", *ledger, "--quiet", "--format", "json")
    assert done.code == 0 and done.data["unfinished"] == {}
    first, second = json.loads((tmp_path / "docs" / "results.json").read_text())["full_size"]
    assert (first["row"], first["paper"], first["published"]) == ("own_table1_short", "Own, Table 1", 90.5)
    assert (first["rounds"], first["of"], first["seeds"], second["published"]) == (1, 1, [0, 1], None)
    assert first["command"] == "fedloom reproduce own_table1_short --full --seeds 2"
    measured = [run["measured"] for run in first["by_seed"]]
    assert first["measured"] == pytest.approx(sum(measured) / 2, abs=1e-3) and first["seconds"] > 0
    assert first["last"] == first["measured"] and "commit" in first
    page = (tmp_path / "docs" / "results.md").read_text()
    assert FULL_SIZE_START in page and f"{first['measured'] - 90.5:+.2f}" in page
    assert "`own_table1_short`: not analysed yet." in page
    (tmp_path / "docs" / "analyses.toml").write_text('own_table1_short = "Too short."\n')
    again = fedloom("reproduce", "own_table1_short", "--full", *ledger)
    assert again.code == 0 and again.err == "" and "90.5" in again.out
    assert "`own_table1_short`: Too short." in (tmp_path / "docs" / "results.md").read_text()
    kept = json.loads((tmp_path / "docs" / "results.json").read_text())["full_size"]
    assert [one["seeds"] for one in kept] == [[0, 1]] * 2  # no seed is lost
    more = [*ledger, "--runs", "elsewhere", "--first-seed", "2", "--quiet", "--format", "json"]
    assert fedloom("reproduce", "own_table1_short", "--full", *more).code == 0
    kept = json.loads((tmp_path / "docs" / "results.json").read_text())["full_size"]
    assert [one["seeds"] for one in kept] == [[0, 1, 2]] * 2 and kept[0]["by_seed"][:2] == first["by_seed"]


def test_reproduce_full_out_of_time_is_open_and_resumes_to_the_same_bits(ledger, fedloom, tmp_path):
    rows = tmp_path / "own/ledger/own.toml"
    rows.write_text(rows.read_text().replace('short = ["rounds=1"]', 'short = ["rounds=3"]'))
    row = ["reproduce", "own_table1_short", "--full", *ledger, "--quiet", "--format", "json"]
    assert fedloom(*row, "--hours", "1e-9").data["unfinished"] == {"own_table1_short": 0}
    assert fedloom(*row, "--hours", "1e-6").data["unfinished"] == {"own_table1_short": 1}
    assert json.loads((tmp_path / "docs/results.json").read_text())["full_size"][0]["rounds"] == 1
    assert "| 1 of 3 |" in (tmp_path / "docs/results.md").read_text()
    rest = fedloom(*row)
    assert rest.data["unfinished"] == {} and rest.data["full_size"][0]["rounds"] == 3
    assert fedloom(*[one if one != "runs" else "whole" for one in row]).code == 0
    one, other = (read_manifest(tmp_path / home / "own_table1_short") for home in ("runs", "whole"))
    assert one["sha256"] == other["sha256"]


def test_reproduce_all_with_hours_runs_what_fits(ledger, fedloom, tmp_path):
    assert fedloom("reproduce", "--claim", "sooner", *ledger, "--quiet").code == 0
    results = tmp_path / "docs/results.json"
    content = json.loads(results.read_text())
    content["claims"] = [{**one, "wall_seconds": 7200.0} for one in content["claims"] if one["claim"] == "sooner"]
    results.write_text(json.dumps(content))  # the other claim of my.toml is open again, and known to take two hours
    (tmp_path / "runs/claims").rename(tmp_path / "runs/before")
    done = fedloom("reproduce", "--all", "--hours", "1", *ledger, "--quiet", "--format", "json")
    assert [one["claim"] for one in done.data["claims"]] == ["elsewhere"]
    assert list(done.data["left"]) == ["my.toml"] and done.data["left"]["my.toml"].startswith("takes 2")


def test_reproduce_all_out_of_hours_is_resumed_by_the_next_call(ledger, fedloom, tmp_path):
    none = fedloom("reproduce", "--all", "--hours", "1e-9", *ledger, "--quiet")
    assert none.code == 0 and "no claim could be decided in this time" in none.out and "my.toml" in none.out
    assert not (tmp_path / "docs").exists()
    some = fedloom("reproduce", "--all", "--hours", "2e-5", *ledger, "--quiet", "--format", "json")
    assert some.data["claims"] == [] and "goes on" in str(some.data["left"])
    rest = fedloom("reproduce", "--all", "--hours", "1", *ledger, "--quiet", "--format", "json")
    assert len(rest.data["claims"]) == 3 and "left" not in rest.data


def test_reproduce_row_can_start_from_another_run(ledger, fedloom, tmp_path):
    rows = tmp_path / "own/ledger/own.toml"
    text = rows.read_text().replace("short = [", 'late = ["rounds=2"]\nshort = [', 1)
    rows.write_text(
        text.replace('rows = { "short" = [90.5', 'starts = { late = ["rounds=1"] }\nrows = { "late" = [90.5')
    )
    done = fedloom("reproduce", "own_table1_late", *ledger, "--quiet", "--format", "json")
    assert done.code == 0
    assert read_manifest(tmp_path / "runs/own_table1_late_start")["status"] == "finished"
    recipe = (tmp_path / "runs/own_table1_late/recipe.toml").read_text()
    assert "runs/own_table1_late_start" in recipe and "rounds = 2" in recipe


def test_reproduce_row_of_costs_needs_no_run(ledger, fedloom, tmp_path):
    done = fedloom("reproduce", "own_table2_short", *ledger, "--format", "json")
    (number,) = done.data["numbers"]
    assert number["published"] == 1000 and number["measured"] > 0
    assert not (tmp_path / "runs").exists()


def test_reproduce_row_changed_recipe_is_refused(ledger, fedloom, tmp_path):
    assert fedloom("reproduce", "own_table1_short", *ledger, "--quiet").code == 0
    recipe = tmp_path / "own" / "my.toml"
    recipe.write_text(recipe.read_text().replace("batch_size = 100", "batch_size = 50"))
    done = fedloom("reproduce", "own_table1_short", *ledger)
    assert done.code == 4
    assert "RECIPE_CHANGED" in done.err and "training.batch_size was 100, is 50" in done.err


def test_reproduce_claim_decides_all_claims_of_its_runs(ledger, fedloom, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "results.md").write_text("# Results\n\nby hand\n")
    (tmp_path / "docs" / "analyses.toml").write_text('sooner = "Both are there at once."\n')
    done = fedloom("reproduce", "--claim", "masked-like-unmasked", *ledger, "--quiet", "--format", "json")
    assert done.code == 0
    assert [one["claim"] for one in done.data["claims"]] == ["masked-like-unmasked", "sooner"]
    result = json.loads((tmp_path / "docs" / "results.json").read_text())
    first, second = result["claims"]
    assert first["verdict"] == "holds" and first["measured"]["difference"] == [0.0, 0.0]
    assert (first["paper"], first["published"], first["seeds"]) == ("Own", "90.5 against 90.5", [0, 1])
    assert first["command"] == "fedloom reproduce --claim masked-like-unmasked"
    assert first["wall_seconds"] > 0 and "commit" in first
    assert "large" in second["measured"]["targets"] and "small" in second["measured"]["targets"]
    made_of = result["comparisons"]["my.toml"]
    assert made_of["arms"].keys() == {"heterofl", "unmasked"}
    assert len(made_of["arms"]["unmasked"]["1"]["sha256"]) == 64
    assert made_of["torch"] and made_of["machine"] and made_of["data"]
    page = (tmp_path / "docs" / "results.md").read_text()
    assert page.startswith(f"# Results\n\nby hand\n\n{SECTION_START}") and page.endswith(f"{SECTION_END}\n")
    assert "2 claims evaluated" in page and "1 not yet" in page and "Both are there at once." in page


def test_reproduce_all_decides_only_open_claims(ledger, fedloom, tmp_path):
    assert fedloom("reproduce", "--claim", "sooner", *ledger, "--quiet").code == 0
    before = json.loads((tmp_path / "docs" / "results.json").read_text())
    rest = fedloom("reproduce", "--all", *ledger, "--quiet", "--format", "json")
    assert [one["claim"] for one in rest.data["claims"]] == ["elsewhere"]
    after = json.loads((tmp_path / "docs" / "results.json").read_text())
    assert after["claims"][:2] == before["claims"]
    assert after["comparisons"]["my.toml"] == before["comparisons"]["my.toml"]
    (tmp_path / "docs" / "analyses.toml").write_text('elsewhere = "Added later."\n')
    none = fedloom("reproduce", "--all", *ledger)
    assert (none.code, none.out) == (0, "every claim has been decided\n")
    assert "Added later." in (tmp_path / "docs" / "results.md").read_text()
    assert json.loads((tmp_path / "docs" / "results.json").read_text()) == after


def test_reproduce_claim_with_changes_is_not_recorded(ledger, fedloom, tmp_path):
    done = fedloom("reproduce", "--claim", "sooner", *ledger, "--set", "rounds=1", "--quiet", "--format", "json")
    assert done.code == 0 and done.data["results"] is None
    assert done.data["claims"][0]["command"].endswith("--set rounds=1")
    assert not (tmp_path / "docs").exists()


STOPPED = """
import os
from fedloom.methods import METHODS as KNOWN

class Stopped(KNOWN["heterofl"]):
    def round(self, server, context):
        made = super().round(server, context)
        if context.number == 2 and "STOP" in os.environ:
            os.kill(os.getpid(), int(os.environ["STOP"]))
        return made

METHODS = {"heterofl": Stopped}
"""


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(["own_table1_long"], id="row"),
        pytest.param(["--claim", "sooner"], id="claim", marks=pytest.mark.slow),
    ],
)
def test_reproduce_interrupted_resumes(what, ledger, fedloom, tmp_path):
    """The result has the same bits as without the interruption."""
    rows = tmp_path / "own/ledger/own.toml"
    rows.write_text(
        rows.read_text()
        .replace('"short" = [90.5, "-"]', '"long" = [90.5, "-"]')
        .replace("[choices]", "[choices]\nlong = []")
    )
    recipe = tmp_path / "own" / "my.toml"
    recipe.write_text(recipe.read_text().replace("rounds = 2", "rounds = 4\n[checkpoints]\nevery = 1\n"))
    (tmp_path / "stopped.py").write_text(STOPPED)
    command = ["reproduce", *what, *ledger, "--with", "stopped.py", "--workers", "1", "--quiet"]
    stopped = subprocess.run(
        [sys.executable, "-m", "fedloom", *command],
        cwd=tmp_path, env={**os.environ, "STOP": str(int(signal.SIGTERM))}, capture_output=True, timeout=100,
    )  # fmt: skip
    assert stopped.returncode == 130, stopped.stderr
    assert not (tmp_path / "docs").exists()
    assert fedloom(*command).code == 0
    whole = [one if one != "runs" else "whole" for one in command]
    assert fedloom(*whole).code == 0
    folders = sorted(path.parent.relative_to(tmp_path / "runs") for path in (tmp_path / "runs").rglob("rows.jsonl"))
    assert len(folders) == (1 if len(what) == 1 else 4)
    for folder in folders:
        assert (tmp_path / "runs" / folder / "rows.jsonl").read_bytes() == (
            tmp_path / "whole" / folder / "rows.jsonl"
        ).read_bytes()
        one, other = (read_manifest(tmp_path / home / folder) for home in ("runs", "whole"))
        assert one["sha256"] == other["sha256"]


def test_reproduce_claim_changed_recipe_is_refused(ledger, fedloom, tmp_path):
    assert fedloom("reproduce", "--claim", "sooner", *ledger, "--quiet").code == 0
    recipe = tmp_path / "own" / "my.toml"
    recipe.write_text(recipe.read_text().replace("batch_size = 100", "batch_size = 50"))
    done = fedloom("reproduce", "--claim", "sooner", *ledger)
    assert done.code == 4 and "RECIPE_CHANGED" in done.err


def test_reproduce_claim_other_seeds_are_refused(ledger, fedloom, tmp_path):
    assert fedloom("reproduce", "--claim", "elsewhere", *ledger, "--quiet").code == 0
    claims = tmp_path / "own/ledger/claims.toml"
    claims.write_text(claims.read_text().replace("seeds = 2", "seeds = 3"))
    done = fedloom("reproduce", "--claim", "elsewhere", *ledger)
    assert done.code == 4 and "RECIPE_CHANGED" in done.err and "seeds" in done.err


def test_reproduce_claim_records_the_commit_of_its_start(ledger, fedloom, tmp_path):
    def commit(message):
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
        for command in (["init", "-q"], ["add", "own"], ["commit", "-q", "--allow-empty", "-m", message]):
            subprocess.run(["git", *who, *command], check=True)
        return subprocess.run(
            ["git", "-C", str(tmp_path), "rev-parse", "--short=10", "HEAD"], check=True, capture_output=True, text=True
        ).stdout.strip()

    began = commit("before")
    for _ in range(2):
        done = fedloom("reproduce", "--claim", "elsewhere", *ledger, "--quiet", "--format", "json")
        assert done.data["claims"][0]["commit"] == began
        assert commit("after") != began


def test_reproduce_claim_missing_metric_is_an_error(ledger, fedloom, tmp_path):
    claims = tmp_path / "own/ledger/claims.toml"
    claims.write_text(
        claims.read_text().replace('this = { arm = "heterofl" }', 'this = { arm = "heterofl", tier = "larg" }')
    )
    done = fedloom("reproduce", "--claim", "elsewhere", *ledger, "--quiet")
    assert done.code == 4 and "NOT_MEASURED" in done.err and "heterofl has no global accuracy of larg" in done.err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], "ARGUMENTS"),
        (["own_table1_short", "--all"], "ARGUMENTS"),
        (["own_table1_shirt"], "ROW_NAME"),
        (["--claim", "sooner", "--full"], "ARGUMENTS"),
        (["own_table1_short", "--seeds", "2"], "ARGUMENTS"),
        (["own_table1_short", "--hours", "1"], "ARGUMENTS"),
        (["own_table2_short", "--full"], "ARGUMENTS"),
        (["--claim", "soon"], "CLAIM_NAME"),
    ],
)
def test_reproduce_bad_arguments_are_refused(arguments, code, ledger, fedloom, tmp_path):
    done = fedloom("reproduce", *arguments, *ledger, "--format", "json")
    assert (done.code, done.failure["error_code"]) == (4, code)
    assert not (tmp_path / "runs").exists()


def test_reproduce_claim_unknown_arm_is_refused_before_any_run(ledger, fedloom, tmp_path):
    claims = tmp_path / "own/ledger/claims.toml"
    claims.write_text(claims.read_text().replace('baseline = { arm = "unmasked" }', 'baseline = { arm = "masked" }'))
    done = fedloom("reproduce", "--claim", "masked-like-unmasked", *ledger)
    assert done.code == 4 and "needs the arm 'masked'" in done.err
    assert not (tmp_path / "runs").exists()


def test_reproduce_without_lists_is_refused(fedloom):
    done = fedloom("reproduce", "--all", "--recipes", "nowhere")
    assert done.code == 4 and "--recipes" in done.err


def test_reproduce_list_shows_project_rows_and_claims(fedloom, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")  # where it fits, a table is in one piece
    own = ["--recipes", ROOT / "recipes"]
    result = fedloom("reproduce", "--list", *own, "--format", "json")
    assert len(result.data["rows"]) > 1000 and len(result.data["claims"]) >= 24
    assert {"name", "paper", "statement", "published", "recipe", "arms", "verdict"} == result.data["claims"][0].keys()
    some = fedloom("reproduce", "--list", "fedsup_table9", *own)
    assert some.out.count("fedsup_table9_") == 6 and "30.41" in some.out


def test_reproduce_all_failed_comparison_does_not_stop_the_others(ledger, fedloom, tmp_path):
    recipe = tmp_path / "own" / "my.toml"
    recipe.write_text(recipe.read_text() + "\n[faults]\ndropout = 1.0\nmax_failed_rounds = 1\n")
    rest = fedloom("reproduce", "--all", *ledger, "--quiet", "--format", "json")
    assert rest.code == 1
    assert [one["claim"] for one in rest.data["claims"]] == ["elsewhere"]
    assert list(rest.data["failed"]) == ["my.toml"] and "heterofl seed 0" in rest.data["failed"]["my.toml"]
    alone = fedloom("reproduce", "--claim", "sooner", *ledger, "--quiet")
    assert alone.code == 1 and "RUNS_FAILED" in alone.err
