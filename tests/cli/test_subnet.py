"""fedloom subnet: the best subnet of a finished run within a budget, and the Pareto front."""

import json

import pytest
import torch
from safetensors.torch import load_file

from fedloom import load_model
from fedloom.recipe.errors import RecipeError

ROW = ["settings", "parameters", "macs", "accuracy", "examples", "trained"]

TIERS = ("--space", "tiers")


@pytest.fixture(scope="module")
def made(fedloom_in):
    """A run of two tiers that differ in width and in depth of hidden layers: (call, folder)."""
    call, write, folder = fedloom_in
    write(
        ("hidden = [2, 4]", ""),
        ("width = 1.0", "hidden = [4, 8]\nwidth = 1.0"),
        ("width = 0.5", "hidden = [2, 4]\nwidth = 0.5"),
    )
    assert call("run", "my.toml", "--out", "run", "--quiet").code == 0
    assert call("subnet", "run", "--quiet", *TIERS).code == 0
    return call, folder


def test_subnet_json_has_best_and_front(made):
    call, folder = made
    result = call("subnet", "run", *TIERS, "--format", "json")
    assert (result.code, result.err) == (0, "")
    assert list(result.data) == ["best", "front", "hyper_volume", "measured", "out"]
    assert list(result.data["best"]) == ROW
    rows = [json.loads(line) for line in (folder / "run" / "subnets.jsonl").read_text().splitlines()]
    assert result.data["measured"] == {
        "nets": len(rows), "now": 0, "seconds_each": 0.0, "examples": 360, "of": "test", "rows": "run/subnets.jsonl",
    }  # fmt: skip
    assert {key: value for key, value in result.data["best"].items() if key != "trained"} in rows
    assert result.data["best"]["accuracy"] == max(row["accuracy"] for row in rows)
    assert all({key: value for key, value in row.items() if key != "trained"} in rows for row in result.data["front"])
    assert result.data["out"] is None


@pytest.mark.parametrize(("option", "key"), [("--macs", "macs"), ("--params", "parameters")])
def test_subnet_budget_is_kept(option, key, made):
    call, folder = made
    rows = [json.loads(line) for line in (folder / "run" / "subnets.jsonl").read_text().splitlines()]
    for most in sorted({row[key] for row in rows}):
        best = call("subnet", "run", *TIERS, option, most, "--format", "json").data["best"]
        assert best[key] <= most
        assert best["accuracy"] == max(row["accuracy"] for row in rows if row[key] <= most)
    least = min(row[key] for row in rows)
    result = call("subnet", "run", *TIERS, option, least - 1)
    (issue,) = result.issues
    assert (result.code, result.out, issue.where, issue.code) == (4, "", option, "BUDGET_SMALL")
    assert issue.message.endswith(f"the smallest takes {least:,}")


def test_subnet_latency_budget_is_kept(made):
    call, _ = made
    best = call("subnet", "run", *TIERS, "--latency-ms", 60_000, "--format", "json", "--quiet").data["best"]
    assert list(best) == [*ROW, "latency_ms"]
    assert 0 < best["latency_ms"] <= 60_000
    result = call("subnet", "run", *TIERS, "--latency-ms", 60_000)
    assert result.err == "timing subnets on this machine\n"
    assert "ms for one example, on one thread of this machine\n" in result.out
    result = call("subnet", "run", *TIERS, "--latency-ms", 0, "--quiet")
    (issue,) = result.issues
    assert (result.code, issue.where, issue.code) == (4, "--latency-ms", "BUDGET_SMALL")
    assert "ms on this machine; the smallest takes 0." in issue.message


def test_subnet_text_shows_best_and_front(made):
    call, _ = made
    data = call("subnet", "run", *TIERS, "--format", "json").data
    result = call("subnet", "run", *TIERS)
    assert (result.code, result.err) == (0, "")
    best, lines = data["best"], result.out.splitlines()
    assert lines[1] == f"parameters  {best['parameters']:,}"
    assert lines[2] == f"MACs        {best['macs']:,}"
    assert lines[3] == f"accuracy    {best['accuracy']:.2f} % of 360 test examples"
    assert lines[4] == f"trained     {best['trained']}"
    assert lines[6].split() == ["accuracy", "MACs", "parameters", "trained", "settings"]
    table = [line.split()[:3] for line in lines[7 : 7 + len(data["front"])]]
    assert table == [[f"{row['accuracy']:.2f}", f"{row['macs']:,}", f"{row['parameters']:,}"] for row in data["front"]]
    assert lines[-3] == f"hypervolume   {data['hyper_volume']:,.0f} MACs x %, against the most MACs and 0 %"
    assert lines[-2] == f"measured      0 now, {data['measured']['nets']} before"
    assert lines[-1] == "chosen on     360 test examples, so its accuracy is slightly overestimated"


def test_subnet_progress_shows_seconds_each(fedloom, write):
    write()
    fedloom("run", "my.toml", "--out", "run", "--set", "rounds=1", "--quiet")
    result = fedloom("subnet", "run", "--workers", 1)
    assert result.err.startswith("subnets 3/3  ")
    assert " s each  0 s to go\n" in result.err
    assert result.out.splitlines()[-2].startswith("measured      3 now, 0 before; ")
    capped = fedloom("subnet", "run", "--examples", 100, "--quiet", "--format", "json")
    assert (capped.code, capped.err) == (0, "")
    assert (capped.data["best"]["examples"], capped.data["measured"]["now"]) == (100, 3)
    assert capped.data["measured"]["seconds_each"] > 0


def test_subnet_out_holds_the_weights(made):
    call, folder = made
    least = call("subnet", "run", *TIERS, "--format", "json").data["front"][0]
    result = call("subnet", "run", *TIERS, "--macs", least["macs"], "--out", "net.safetensors")
    assert result.code == 0
    assert result.out.endswith('\nwritten: net.safetensors\nload it: fedloom.load_model("net.safetensors")\n')
    weights = load_file(folder / "net.safetensors")
    learned = [weight for name, weight in weights.items() if "running" not in name]
    assert sum(weight.numel() for weight in learned) == least["parameters"]
    again = call("subnet", "run", *TIERS, "--out", "net.safetensors")
    (issue,) = again.issues
    assert (again.code, issue.where, issue.code) == (4, "--out", "OUT_EXISTS")
    nowhere = call("subnet", "run", *TIERS, "--out", "nowhere/net.safetensors")
    assert (nowhere.code, nowhere.issues[0].code) == (4, "OUT_MISSING")


@pytest.mark.parametrize("folder", ["nothing", "."])
def test_subnet_other_folder_is_refused(folder, fedloom, files):
    before = files()
    result = fedloom("subnet", folder)
    (issue,) = result.issues
    assert (result.code, result.out, issue.where, issue.code) == (4, "", folder, "RUN_FOLDER")
    assert files() == before
    assert fedloom("subnet", folder, "--format", "json").failure["error_code"] == "RUN_FOLDER"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "run"),
        (["run", "--macs", "1", "--params", "1"], "use one of --macs, --params and --latency-ms"),
        (["run", "--macs", "1", "--latency-ms", "1"], "use one of --macs, --params and --latency-ms"),
        (["run", "--macs", "few"], "--macs"),
        (["run", "--count", "0"], "--count"),
        (["run", "--examples", "0"], "--examples"),
    ],
)
def test_subnet_bad_arguments_are_refused(arguments, words, fedloom, files):
    before = files()
    result = fedloom("subnet", *arguments)
    assert (result.code, result.out) == (4, "")
    assert result.err.startswith("error ARGUMENTS: ")
    assert words in result.err.lower()
    assert result.err.endswith("  hint: fedloom subnet --help\n")
    assert files() == before


def test_subnet_space_selects_the_search_space(made):
    call, _ = made
    assert call("subnet", "run", "--space", "tiers").code == 0
    result = call("subnet", "run", "--space", "tier")
    (issue,) = result.issues
    assert (result.code, issue.where, issue.code) == (4, "--space", "SPACE_NAME")
    assert "tiers" in issue.hint


def test_subnet_user_family_works(fedloom, write, tmp_path):
    (tmp_path / "my.py").write_text(
        "from torch import nn\n\n"
        "def mine(*, input_shape, classes, width=1.0):\n"
        "    hidden = round(8 * width)\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, classes))\n\n"
        "MODELS = {'mine': mine}\n"
    )
    write(('"convnet"\nhidden = [2, 4]', '"mine"'))
    assert fedloom("run", "my.toml", "--with", "my.py", "--out", "run", "--quiet").code == 0
    result = fedloom("subnet", "run", "--with", "my.py", "--macs", 300, "--format", "json", "--quiet")
    assert result.code == 0
    assert result.data["best"]["settings"]["width"] == 0.5
    assert result.data["best"]["macs"] == 64 * 4 + 4 * 10
    assert fedloom("subnet", "run").code == 4
    out = fedloom("subnet", "run", "--with", "my.py", "--macs", 400, "--out", "net.safetensors", "--quiet")
    assert out.code == 0
    net = load_model("net.safetensors", extensions=["my.py"])
    assert net(torch.zeros(3, 1, 8, 8, dtype=torch.uint8)).shape == (3, 10)
    with pytest.raises(RecipeError, match=r"this model was made with my\.py"):
        load_model("net.safetensors")
