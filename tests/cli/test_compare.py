"""fedloom compare: a recipe against its controls, paired by seed."""

import re
import tomllib
from pathlib import Path

import pytest

from fedloom.runs.folder import read_manifest, read_rows

pytestmark = pytest.mark.slow

ARMS = ["heterofl", "standalone", "small-for-all", "drop-the-small", "all-large"]
LARGE, SMALL = 4 * 158 + 2, 4 * 66 + 2  # bytes that a device of each tier sends up


@pytest.fixture(scope="module")
def compared(fedloom_in):
    """Five arms, two seeds, one round."""
    call, write, folder = fedloom_in
    write(("rounds = 2", "rounds = 1"))
    result = call("compare", "my.toml", "--seeds", "2", "--seed", "7", "--out", "out", "--format", "json")
    assert result.code == 0
    return result, folder / "out"


@pytest.fixture(scope="module")
def recipe_of(compared):
    def read(arm, seed=7):
        return tomllib.loads((compared[1] / arm / f"seed-{seed}" / "recipe.toml").read_text())

    return read


@pytest.fixture(scope="module")
def moved(compared):
    """Bytes that an arm's devices uploaded in its only round."""

    def read(arm, seed=7):
        (row,) = [row for row in read_rows(compared[1] / arm / f"seed-{seed}") if row.metric == "bytes_up"]
        return row.value

    return read


def test_compare_every_arm_and_seed_has_a_run(compared):
    _, folder = compared
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == sorted(ARMS)
    for arm in ARMS:
        assert sorted(path.name for path in (folder / arm).iterdir()) == ["seed-7", "seed-8"]
        for seed in (7, 8):
            manifest = read_manifest(folder / arm / f"seed-{seed}")
            assert (manifest["seed"], manifest["status"]) == (seed, "finished")


def test_compare_arms_are_paired_by_seed(compared):
    _, folder = compared
    maps = {seed: {read_manifest(folder / arm / f"seed-{seed}")["partition"] for arm in ARMS} for seed in (7, 8)}
    assert len(maps[7]) == len(maps[8]) == 1
    assert maps[7] != maps[8]


def test_compare_json_has_arms_and_verdict(compared):
    result, _ = compared
    assert list(result.data) == [
        "run",
        "arms",
        "test",
        "finding",
        "verdict",
        "targets",
        "claims",
        "overall",
        "pairs",
        "devices",
        "left_out",
        "failed",
        "searches",
    ]
    assert result.data["run"] == "out"
    assert [record["arm"] for record in result.data["arms"]] == ARMS
    for record in result.data["arms"]:
        assert list(record) == [
            "arm", "metric", "accuracy", "worst_tier", "local_test", "global_test", "can_run", "served_percent",
            "macs", "bytes_per_round", "seconds",
        ]  # fmt: skip
        assert list(record["accuracy"]) == list(record["can_run"]) == ["large", "small"]
        assert all(set(one) == {"mean", "std"} for one in record["accuracy"].values())
    assert len(result.data["verdict"]) >= 5
    assert result.data["targets"] == result.data["claims"] == []


def test_compare_accuracy_is_mean_of_last_round_over_seeds(compared):
    result, folder = compared
    served = {"small-for-all": "small", "drop-the-small": "large", "all-large": "large"}
    for record in result.data["arms"]:
        for tier, accuracy in record["accuracy"].items():
            values = [
                row.value
                for seed in (7, 8)
                for row in read_rows(folder / record["arm"] / f"seed-{seed}")
                if (row.tier, row.device, row.test, row.metric)
                == (served.get(record["arm"], tier), "", "global", "accuracy")
            ]
            assert len(values) == 2
            assert accuracy["mean"] == pytest.approx(sum(values) / 2, abs=1e-12)
            assert accuracy["std"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5, abs=1e-12)


def test_compare_json_marks_tiers_an_arm_serves(compared):
    served = {record["arm"]: record["served_percent"] for record in compared[0].data["arms"]}
    assert served == {"heterofl": 100, "standalone": 100, "small-for-all": 100, "drop-the-small": 50, "all-large": 50}


def test_compare_progress_names_arm_and_seed(compared):
    result, _ = compared
    named = [line.partition("  ")[0] for line in result.err.splitlines()]
    assert sorted(named) == sorted(f"{arm} seed {seed}" for arm in ARMS for seed in (7, 8))


def test_compare_first_arm_is_the_recipe_but_for_the_seed(recipe_of):
    first, second = recipe_of("heterofl", 7), recipe_of("heterofl", 8)
    assert (first.pop("seed"), second.pop("seed")) == (7, 8)
    assert first == second
    assert [tier["name"] for tier in first["tiers"]] == ["large", "small"]
    assert first["fleet"]["eligible"] == []


def test_compare_standalone_sends_nothing(recipe_of, moved):
    assert recipe_of("standalone")["method"] == {"name": "standalone"}
    assert [tier["name"] for tier in recipe_of("standalone")["tiers"]] == ["large", "small"]
    assert moved("standalone") == 0


def test_compare_small_for_all_has_only_the_smallest_tier(recipe_of, moved):
    (tier,) = recipe_of("small-for-all")["tiers"]
    assert tier == {"name": "small", "share": 1.0, "width": 0.5}
    assert recipe_of("small-for-all")["method"] == {"name": "heterofl"}
    assert moved("small-for-all") == 4 * SMALL


def test_compare_drop_the_small_trains_only_large_devices(recipe_of, moved):
    assert recipe_of("drop-the-small")["fleet"]["eligible"] == ["large"]
    assert moved("heterofl") == 2 * LARGE + 2 * SMALL
    assert moved("drop-the-small") == 2 * LARGE


def test_compare_all_large_has_only_the_largest_tier(recipe_of, moved):
    (tier,) = recipe_of("all-large")["tiers"]
    assert tier == {"name": "large", "share": 1.0, "width": 1.0}
    assert moved("all-large") == 4 * LARGE


def test_compare_text_is_a_table_and_a_verdict(fedloom, write, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # where it fits, a table is in one piece
    write(("rounds = 2", "rounds = 1"))
    result = fedloom("compare", "my.toml", "--out", "out")
    assert result.code == 0
    table, verdict, where = result.out.split("\n\n")
    header, *lines = table.splitlines()
    lines, legend = lines[: len(ARMS)], " ".join(lines[len(ARMS) :])
    assert header.split() == [
        "arm",
        "large",
        "small",
        "worst",
        "local",
        "test",
        "served",
        "MACs",
        "bytes",
        "per",
        "round",
    ]
    assert [line.split()[0] for line in lines] == ARMS
    assert "in brackets" in legend and "a tier's model on those of all devices" in legend
    by_arm = {line.split()[0]: line for line in lines}
    assert "(" in by_arm["all-large"]
    assert "(" not in by_arm["heterofl"]
    finding, *gains = verdict.splitlines()[1:]
    assert re.match(r"  heterofl (beats|loses|is within noise)", finding)
    assert [line.split(":")[0].strip() for line in gains[:2]] == ["large", "small"]
    assert all(re.search(r": [+-]?[\d.]+ points against \S+ \(± [\d.]+, 1 seed\): ", line) for line in gains[:2])
    assert where == "runs: out\n"
    assert {line.partition("  ")[0] for line in result.err.splitlines()} == set(ARMS)


def test_compare_chosen_controls_on_local_tests(fedloom, write):
    write(("rounds = 2", "rounds = 1"))
    result = fedloom(
        "compare", "my.toml", "--controls", " standalone, all-large ", "--test", "local", "--out", "out", "--quiet",
        "--format", "json",
    )  # fmt: skip
    assert (result.code, result.err) == (0, "")
    assert [record["arm"] for record in result.data["arms"]] == ["heterofl", "standalone", "all-large"]


def test_compare_empty_controls_runs_only_the_recipe(fedloom, write):
    write(("rounds = 2", "rounds = 1"))
    result = fedloom("compare", "my.toml", "--controls", "", "--out", "out", "--format", "json")
    assert result.code == 0
    assert [record["arm"] for record in result.data["arms"]] == ["heterofl"]


def test_compare_one_tier_runs_only_standalone_control(fedloom, write):
    write(("width = 0.5", "width = 1.0"), ('name = "heterofl"', 'name = "fedavg"'), ("rounds = 2", "rounds = 1"))
    changes = ["--set", "tiers=[{name='all',share=1.0}]"]
    result = fedloom("compare", "my.toml", *changes, "--out", "out", "--format", "json")
    assert result.code == 0
    assert [record["arm"] for record in result.data["arms"]] == ["fedavg", "standalone"]


def test_compare_standalone_recipe_has_no_standalone_control(fedloom, write):
    write(('name = "heterofl"', 'name = "standalone"'), ("rounds = 2", "rounds = 1"))
    result = fedloom("compare", "my.toml", "--controls", "standalone", "--out", "out", "--format", "json")
    assert result.code == 0
    assert [record["arm"] for record in result.data["arms"]] == ["standalone"]


def test_compare_tier_without_devices_json_is_valid(fedloom, write):
    """No device trains at that tier, so it has no accuracy; JSON has no NaN."""
    write(
        ("share = 0.5\nwidth = 1.0", "share = 0.1\nwidth = 1.0"),
        ("share = 0.5\nwidth = 0.5", "share = 0.9\nwidth = 0.5"),
        ("rounds = 2", "rounds = 1"),
    )
    result = fedloom("compare", "my.toml", "--controls", "standalone", "--out", "out", "--format", "json")
    assert result.code == 0
    assert [record["arm"] for record in result.data["arms"]] == ["heterofl", "standalone"]
    assert not any("nan" in line for line in result.data["verdict"])


def test_compare_unfitting_start_model_is_refused_before_any_run(fedloom, write, files):
    """The file holds the large model, and the control with small models only cannot start from it."""
    write(("rounds = 2", "rounds = 1"))
    assert fedloom("run", "my.toml", "--out", "run").code == 0
    before = files()
    result = fedloom(
        "compare", "my.toml", "--set", "start.from=run/models/large.safetensors", "--controls", "small-for-all",
        "--out", "out",
    )  # fmt: skip
    assert result.code == 4
    assert [one.code for one in result.issues] == ["START_SHAPE"]
    assert files() == before


COMPARE = """
[compare]
baseline = "decouple"
margin = 2.0

[compare.arms]
decouple = ["method={name='decouple'}"]
fedrolex = ["method={name='fedrolex'}", "training.epochs=2"]
"""
METHOD = '[method]\nname = "heterofl"\n'


def with_arms(**changes):
    text = COMPARE
    for old, new in changes.items():
        text = text.replace(old, new)
    return METHOD, METHOD + text


def test_compare_recipe_arms_run_without_controls(fedloom, write, tmp_path):
    write(with_arms())
    result = fedloom("compare", "my.toml", "--seeds", "3", "--out", "out", "--format", "json", "--quiet")
    assert result.code == 0
    own = ["heterofl", "decouple", "fedrolex"]
    assert [record["arm"] for record in result.data["arms"]] == own
    assert [(one["tier"], one["arm"]) for one in result.data["targets"]] == [
        (tier, arm) for tier in ("large", "small") for arm in own
    ]
    for tier in ("large", "small"):
        ends = [
            [r.value for r in read_rows(tmp_path / f"out/decouple/seed-{seed}")
             if (r.tier, r.device, r.test, r.metric) == (tier, "", "global", "accuracy")][-1]
            for seed in range(3)
        ]  # fmt: skip
        found = {one["arm"]: one for one in result.data["targets"] if one["tier"] == tier}
        assert found["decouple"]["target"] == sorted(ends)[1] - 2.0
        assert all(len(one["rounds"]) == len(one["bytes"]) == 3 for one in found.values())
    assert [(one["tier"], one["other"]) for one in result.data["claims"]] == [
        (tier, arm) for tier in ("large", "small") for arm in own[1:]
    ]
    written = tomllib.loads((tmp_path / "out/fedrolex/seed-1/recipe.toml").read_text())
    assert "compare" not in written
    assert (written["method"]["name"], written["training"]["epochs"], written["seed"]) == ("fedrolex", 2, 1)


def test_compare_recipe_arms_with_chosen_controls(fedloom, write):
    write(with_arms(), ("rounds = 2", "rounds = 1"))
    result = fedloom("compare", "my.toml", "--controls", "all-large", "--out", "out", "--format", "json", "--quiet")
    assert [record["arm"] for record in result.data["arms"]] == ["heterofl", "decouple", "fedrolex", "all-large"]
    carried = {(one["tier"], one["arm"]) for one in result.data["targets"]}
    assert ("large", "all-large") in carried
    assert ("small", "all-large") not in carried


def test_compare_targets_text_has_a_second_table(fedloom, write, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    write(with_arms())
    result = fedloom("compare", "my.toml", "--seeds", "2", "--out", "out", "--quiet")
    assert result.code == 0
    _, table, verdict, _ = result.out.split("\n\n")
    table, _, legend = table.partition("\nRounds, megabytes")
    header, *lines = table.splitlines()
    assert header.split() == ["arm", "tier", "target", "rounds", "MB", "seconds", "gain"]
    arms = ["heterofl", "decouple", "fedrolex"]
    assert [line.split()[:2] for line in lines] == [[arm, tier] for tier in ("large", "small") for arm in arms]
    assert all("–" in line for line in lines)
    assert "median" in legend
    assert re.search(r"reach(es)? .* (sooner|equally soon)", verdict)


@pytest.mark.parametrize("verb", ["check", "plan", "run", "compare"])
@pytest.mark.parametrize(
    ("old", "new", "what", "begins"),
    [
        ('baseline = "decouple"', 'baseline = "decoupel"', "compare.baseline = 'decoupel'", "baseline"),
        ('"training.epochs=2"', '"training.epochs"', "compare.arms.fedrolex[1] = 'training.epochs'", "fedrolex"),
    ],
)
def test_every_verb_bad_compare_section_is_refused_with_its_line(verb, old, new, what, begins, fedloom, write, line_of):
    path = write(with_arms(**{old: new}))
    result = fedloom(verb, "my.toml")
    assert result.code == 4
    (issue,) = result.issues
    assert (issue.where, issue.what) == (f"my.toml:{line_of(path, begins)}", what)


def test_compare_duplicate_arm_name_is_refused(fedloom, write):
    write(with_arms(fedrolex="decouple"))
    result = fedloom("check", "my.toml")
    assert (result.code, [one.code for one in result.issues]) == (4, ["RECIPE_TOML"])
    assert "line" in result.issues[0].message


@pytest.mark.parametrize("verb", ["check", "compare"])
def test_compare_arm_named_like_the_recipes_method_is_refused_with_a_name_that_works(verb, fedloom, write, line_of):
    path = write(with_arms(fedrolex="heterofl"))
    result = fedloom(verb, "my.toml")
    (issue,) = result.issues
    assert (result.code, issue.where) == (4, f"my.toml:{line_of(path, '[compare]')}")
    assert "the recipe itself is the arm of that name, after its method" in issue.message
    assert "'heterofl-2'" in issue.message
    write(with_arms(fedrolex="heterofl-2", **{"'heterofl-2'": "'fedrolex'"}))
    assert fedloom("check", "my.toml").code == 0


def test_compare_unsupported_arm_is_refused_at_its_line(fedloom, write, line_of, files):
    path = write(with_arms(**{"'fedrolex'": "'fedavg'"}))
    before = files()
    result = fedloom("compare", "my.toml", "--out", "out")
    (issue,) = result.issues
    assert (result.code, issue.code) == (4, "METHOD_REFUSES")
    assert issue.where == f"my.toml:{line_of(path, 'fedrolex')}"
    assert files() == before


def test_compare_unknown_candidate_is_refused(fedloom, write):
    write(with_arms(**{"margin = 2.0": 'candidate = "report_paper"'}))
    result = fedloom("compare", "my.toml", "--out", "out")
    (issue,) = result.issues
    assert (result.code, issue.code, issue.what) == (4, "RECIPE_NAME", "compare.candidate = 'report_paper'")


def test_run_compare_section_changes_nothing(fedloom, write, tmp_path):
    write(with_arms(), ("rounds = 2", "rounds = 1"))
    assert fedloom("run", "my.toml", "--out", "out").code == 0
    assert "compare" not in tomllib.loads((tmp_path / "out/recipe.toml").read_text())


def test_resume_finished_comparison_shows_its_result(compared, fedloom_in):
    result, _ = compared
    again = fedloom_in[0]("resume", "out", "--format", "json")
    assert (again.code, again.data) == (0, result.data)


def test_compare_other_methods_and_recipes_are_arms(fedloom_in):
    call, write, folder = fedloom_in
    write(("rounds = 2", "rounds = 1"))
    (folder / "slow.toml").write_text((folder / "my.toml").read_text() + "\n[aggregation]\nrule = 'median'\n")
    result = call("compare", "my.toml", "slow.toml", "--methods", "fjord,heterofl", "--format", "json", "--out", "more")
    assert result.code == 0
    assert [one["arm"] for one in result.data["arms"]] == ["heterofl", "slow", "fjord"]
    assert tomllib.loads((folder / "more/fjord/seed-0/recipe.toml").read_text())["method"]["name"] == "fjord"


def test_compare_all_methods_are_the_supported_ones(fedloom_in):
    call, write, _ = fedloom_in
    write(("rounds = 2", "rounds = 1"))
    result = call("compare", "my.toml", "--methods", "all", "--equal", "bytes", "--format", "json", "--out", "all")
    assert result.code == 0
    assert {"heterofl", "fjord", "fedrolex", "fedsup", "standalone"} <= {one["arm"] for one in result.data["arms"]}
    left_out = result.data["left_out"]
    assert left_out["fedavg"] == "gives every device the same model, but the tiers differ"
    assert left_out["fedhen"].startswith("is about early exits, and convnet has none")
    assert not left_out.keys() & {one["arm"] for one in result.data["arms"]}
    assert not re.search(r"\bfedavg\b", result.err) and "methods fit; the others are listed at the end" in result.err
    assert call("report", "all").code == 0
    page, table = (Path("all", name).read_text() for name in ("report.html", "results.md"))
    assert all(page.count(f"<li>{name}: ") == 1 == table.count(f"- left out: {name}: ") for name in left_out)
    assert "at equal bytes: fjord counts up to round 1 of 1" in result.data["verdict"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--methods", "unknown"], "RECIPE_NAME"), (["--equal", "seconds"], "CLOCK_UNKNOWN")],
)
def test_compare_unfitting_arms_are_refused(fedloom_in, arguments, code):
    call, write, _ = fedloom_in
    write()
    result = call("compare", "my.toml", *arguments, "--format", "json", "--out", "none")
    assert (result.code, result.failure["error_code"]) == (4, code)


def test_compare_at_equal_seconds_needs_speed_of_server_that_trains(fedloom_in):
    call, write, _ = fedloom_in
    timed = "width = 1.0\nspeed = 1e6\nbandwidth = 1e6"
    write(("width = 1.0", timed), ("width = 0.5", timed))
    result = call("compare", "my.toml", "--methods", "fedgh", "--equal", "seconds", "--format", "json", "--out", "none")
    assert (result.code, result.failure["error_code"]) == (4, "CLOCK_UNKNOWN")
    assert result.failure["hint"] == "the server trains in fedgh; set fleet.server_speed"


def test_compare_recipe_with_other_rounds_is_refused(fedloom_in):
    call, write, folder = fedloom_in
    write()
    (folder / "longer.toml").write_text((folder / "my.toml").read_text().replace("rounds = 2", "rounds = 3"))
    result = call("compare", "my.toml", "longer.toml", "--format", "json", "--out", "none")
    assert (result.code, result.failure["error_code"]) == (4, "ARM_DIFFERS")


def test_compare_longer_arm_counts_up_to_the_budget(fedloom_in):
    call, write, folder = fedloom_in
    write()
    with (folder / "my.toml").open("a") as recipe:
        recipe.write("\n[compare.arms]\nlonger = ['rounds=3', 'evaluation.every=1']\n")
    result = call("compare", "my.toml", "--format", "json", "--out", "longer")
    assert result.code == 0
    assert "at equal rounds: longer counts up to round 2 of 3" in result.data["verdict"]
    heterofl, longer = result.data["arms"]
    assert {**heterofl, "arm": "longer"} == longer


def test_compare_compressed_arm_counts_compressed_bytes(fedloom, write, tmp_path):
    write(("rounds = 2", "rounds = 1"))
    result = fedloom(
        "compare", "my.toml", "--controls", "small-for-all", "--set", "compression.uplink.kind=int8", "--out", "out",
        "--format", "json",
    )  # fmt: skip
    for record in result.data["arms"]:
        moved = {row.metric: row.value for row in read_rows(tmp_path / "out" / record["arm"] / "seed-0")}
        assert (
            record["bytes_per_round"]
            == moved["bytes_down_compressed"] + moved["bytes_up_compressed"]
            < moved["bytes_down"] + moved["bytes_up"]
        )


def test_compare_failed_arm_does_not_stop_the_others(fedloom, write):
    silent = '"faults.dropout=1.0", "faults.max_failed_rounds=1"'
    arms = f"[compare.arms]\nsilent = [{silent}]\nfjord = [\"method={{name='fjord'}}\"]\n"
    write(("[method]", f"{arms}\n[method]"))
    result = fedloom("compare", "my.toml", "--seeds", "2", "--out", "out", "--format", "json")
    assert result.code == 1
    assert result.data["failed"] == ["silent seed 0", "silent seed 1"]
    assert "silent seed 0 failed: 1 round in a row failed" in result.err
    by_arm = {record["arm"]: record for record in result.data["arms"]}
    assert by_arm["silent"]["accuracy"]["large"]["mean"] is None
    assert by_arm["fjord"]["accuracy"]["large"]["mean"] > 0
    assert any("on the average device" in line and "fjord" in line for line in result.data["verdict"])
    assert result.data["verdict"][-2:] == ["silent seed 0 failed", "silent seed 1 failed"]
    assert "| silent | – | – | – |" in Path("out/results.md").read_text()
    assert fedloom("report", "out").code == 0
    assert "silent failed with seed 0" in Path("out/report.html").read_text()
    again = fedloom("resume", "out", "--quiet")  # it fails again, and nothing else is run
    assert again.code == 1 and "silent" in again.out
