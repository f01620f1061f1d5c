"""fedloom run: its result, and how options change a recipe."""

import tomllib

import pytest

from fedloom.runs.folder import read_manifest, read_rows


@pytest.fixture(scope="module")
def finished(fedloom_in):
    """One run of the small recipe, for tests that only read it."""
    call, write, folder = fedloom_in
    write()
    result = call("run", "my.toml", "--out", "run", "--format", "json")
    assert result.code == 0
    return result.data, folder / "run"


def test_run_json_has_folder_and_final_values(finished):
    data, folder = finished
    assert list(data) == ["run", "final"]
    assert data["run"] == "run"
    keys = ("candidate", "tier", "test", "metric")
    assert [tuple(one[key] for key in keys) for one in data["final"]] == [
        *(("server", tier, "global", metric) for tier in ("large", "small") for metric in ("accuracy", "loss")),
        *(("server", tier, "local", "accuracy") for tier in ("large", "small")),
    ]
    last = {
        tuple(getattr(row, key) for key in keys): row.value
        for row in read_rows(folder)
        if row.round == 2 and not row.device and row.candidate
    }
    assert {tuple(one[key] for key in keys): one["value"] for one in data["final"]} == last


def test_run_json_has_best_and_last_values(finished):
    data, folder = finished
    rows = [row for row in read_rows(folder) if row.candidate and not row.device]
    for one in data["final"]:
        series = [r.value for r in rows if (r.tier, r.test, r.metric) == (one["tier"], one["test"], one["metric"])]
        assert one["best"] == (min if one["metric"] == "loss" else max)(series)


def test_run_text_is_a_table_of_the_same_values(finished, fedloom, write):
    write()
    result = fedloom("run", "my.toml", "--out", "run")
    header, *lines = result.out.split("\n\n")[0].splitlines()
    assert header.split() == ["model", "test", "metric", "last", "best", "in", "round"]
    assert [line.split()[:5] for line in lines] == [
        [one["candidate"], one["tier"], one["test"], one["metric"], f"{one['value']:.2f}"]
        for one in finished[0]["final"]
    ]


def test_run_without_out_names_its_folder(fedloom, write, tmp_path):
    write()
    first, second = (fedloom("run", "my.toml", "--set", "rounds=1", "--format", "json").data["run"] for _ in range(2))
    assert first != second
    for name in (first, second):
        assert (tmp_path / name).parent == tmp_path / "runs"
        assert "heterofl" in name
        assert read_manifest(tmp_path / name)["status"] == "finished"


def test_run_out_creates_parent_folders(fedloom, write, tmp_path):
    write()
    assert fedloom("run", "my.toml", "--set", "rounds=1", "--out", "a/b/c").code == 0
    assert (tmp_path / "a" / "b" / "c" / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "seed"),
    [
        ([], 0),
        (["--set", "seed=3"], 3),
        (["--seed", "4"], 4),
        (["--set", "seed=3", "--seed", "4"], 4),
        (["--seed", "4", "--set", "seed=3"], 4),
    ],
    ids=["file", "set", "seed", "both", "both the other way round"],
)
def test_run_seed_overrides_the_recipe(arguments, seed, fedloom, write, tmp_path):
    write(("rounds = 2", "rounds = 1"))
    assert fedloom("run", "my.toml", "--out", "run", *arguments).code == 0
    assert read_manifest(tmp_path / "run")["seed"] == seed
    assert tomllib.loads((tmp_path / "run" / "recipe.toml").read_text())["seed"] == seed


def test_run_set_overrides_the_file_last_wins(fedloom, write, tmp_path):
    write()
    result = fedloom(
        "run", "my.toml", "--out", "run", "--set", "rounds=5", "--set", "rounds=1", "--set", "tiers[1].width=1.0",
        "--set", "tiers.0.name=big", "--set", "data.partition={kind='label_shards', labels_per_device=5}",
        "--set", "method.unseen_logit=-inf", "--set", "evaluation.per_device=never",
        "--set", "training.optimizer={kind='adam'}", "--set", "training.optimizer.lr=0.01",
    )  # fmt: skip
    assert result.code == 0
    written = tomllib.loads((tmp_path / "run" / "recipe.toml").read_text())
    assert written["rounds"] == 1
    assert [tier["width"] for tier in written["tiers"]] == [1.0, 1.0]
    assert written["tiers"][0]["name"] == "big"
    assert written["data"]["partition"] == {"kind": "label_shards", "labels_per_device": 5}
    assert written["method"] == {"name": "heterofl", "unseen_logit": float("-inf")}
    assert written["evaluation"]["per_device"] == "never"
    assert written["training"]["optimizer"] == {"kind": "adam", "lr": 0.01}


def test_run_set_setting_of_a_missing_table_changes_the_default(fedloom, write, tmp_path):
    write(("rounds = 2", "rounds = 1"))
    assert fedloom("run", "my.toml", "--out", "run", "--set", "training.optimizer.lr=0.5").code == 0
    written = tomllib.loads((tmp_path / "run" / "recipe.toml").read_text())
    assert written["training"]["optimizer"] == {"kind": "sgd", "lr": 0.5}


def test_run_written_recipe_repeats_the_run(finished, fedloom, tmp_path):
    _, folder = finished
    assert fedloom("run", folder / "recipe.toml", "--out", "again").code == 0
    again = read_manifest(tmp_path / "again")
    assert again["sha256"] == read_manifest(folder)["sha256"]
    assert (tmp_path / "again" / "recipe.toml").read_bytes() == (folder / "recipe.toml").read_bytes()
    assert (tmp_path / "again" / "rows.jsonl").read_bytes() == (folder / "rows.jsonl").read_bytes()


SMALL_DEMO = (
    "run", "--out", "demo", "--set", "rounds=1", "--set", "data.dataset=digits", "--set", "data.max_examples=20",
    "--set", "model.columns=[[2],[2],[2]]", "--set", "compare.control_changes=[]", "--set", "training.epochs=1",
    "--set", "training.batch_size=100",
)  # fmt: skip


def test_run_without_recipe_runs_the_demo(fedloom, tmp_path):
    result = fedloom(*SMALL_DEMO)
    assert result.code == 0
    folders = [path.parent.relative_to(tmp_path / "demo") for path in (tmp_path / "demo").glob("*/*/manifest.json")]
    arms = ("drop-the-small", "everytier", "small-for-all")
    assert sorted(map(str, folders)) == [f"{arm}/seed-{seed}" for arm in arms for seed in range(5)]
    assert "verdict\n" in result.out
    assert "run: demo/everytier/seed-0\n" in result.out
    for command in ("fedloom list methods", "fedloom init heterofl --out my.toml", "fedloom compare my.toml"):
        assert command in result.out
    assert {line.split(" seed ")[0] for line in result.err.splitlines()} == set(arms)


def test_run_demo_json_has_the_first_arm(fedloom):
    result = fedloom(*SMALL_DEMO, "--format", "json", "--quiet")
    assert (result.code, result.err) == (0, "")
    assert result.data["run"] == "demo/everytier/seed-0"
    assert {one["tier"] for one in result.data["final"]} == {"large", "medium", "small"}


def test_run_demo_failed_runs_are_exit_1(fedloom):
    result = fedloom(
        "run", "--set", "faults.dropout=1.0", "--set", "faults.max_failed_rounds=1", "--out", "out", "--quiet"
    )
    assert result.code == 1 and "everytier seed 0 failed: " in result.err
