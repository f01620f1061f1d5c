"""fedloom export: a run's models as files that run elsewhere, proved and measured."""

import contextlib
import json
import shutil
from importlib import import_module

import pytest
import torch

import fedloom as package
from fedloom.exporting import FORMATS, read_card, usage_snippet

PERSONAL = (('name = "heterofl"', 'name = "standalone"'),)
LARGE, SMALL = "depths = [1, 2]\nkernels = [5, 5]", "depths = [1, 1]\nkernels = [3, 3]"
SUPERNET = (
    ('family = "convnet"\nhidden = [2, 4]', f'family = "mobilenet"\nstem = 3\nwidths = [4, 8]\n{LARGE}'),
    ("share = 0.5\nwidth = 0.5", f"share = 0.5\nwidths = [4, 4]\n{SMALL}"),
    ("width = 1.0\n", ""),
    ('name = "heterofl"', 'name = "fedsup"'),
)


@pytest.fixture(scope="module")
def runs(fedloom_in):
    """(call, folder) after three small runs: global, personal and supernet."""
    call, write, folder = fedloom_in
    for name, changes in (("global", ()), ("personal", PERSONAL), ("supernet", SUPERNET)):
        write(*changes, to=f"{name}.toml")
        assert call("run", f"{name}.toml", "--out", name, "--workers", 1, "--quiet").code == 0
    return call, folder


def exported(runs, *arguments):
    call, _ = runs
    result = call("export", *arguments, "--format", "json")
    assert result.code == 0, result.err + result.out
    return result.data


def judged_last(run, **wanted):
    rows = [row for row in package.open_run(run).rows() if all(getattr(row, k) == v for k, v in wanted.items())]
    return rows[-1].value


@pytest.mark.parametrize(
    ("to", "tier"), [("onnx", "small"), pytest.param("pt2", "large", marks=pytest.mark.slow), ("safetensors", "small")]
)
def test_export_tier_model_evaluates_as_in_the_run(to, tier, runs):
    for module in FORMATS[to].needs:
        pytest.importorskip(module)
    card = exported(runs, "global", "--tier", tier, "--to", to, "--out", f"{tier}-{to}")
    accuracy = judged_last("global", candidate="server", tier=tier, device="", test="global", metric="accuracy")
    assert card["evaluated"]["tests"]["global"]["accuracy"] == accuracy
    assert card["measured"]["global"]["accuracy"] == pytest.approx(accuracy)
    assert card["parity"]["difference"] <= card["parity"]["bound"] <= 1e-4
    assert card["latency"]["median_ms"] > 0
    assert card["latency"]["runtime"].startswith(FORMATS[to].runtime)
    if to == "onnx":
        graph = import_module("onnx").load(runs[1] / f"{tier}-{to}" / card["file"]).graph
        axes = {dim.dim_param for value in (*graph.input, *graph.output) for dim in value.type.tensor_type.shape.dim}
        assert axes == {"batch", ""}
    assert (card["input"]["dtype"], card["input"]["shape"]) == ("uint8", [1, 8, 8])
    assert card["output"]["labels"] == list("0123456789")
    assert card["license"]["data"] == "CC BY 4.0"
    for file in ("card.md", "card.json", "card.html", "recipe.toml", card["file"]):
        assert (runs[1] / f"{tier}-{to}" / file).stat().st_size > 0


@pytest.mark.parametrize("to", ["onnx", "pt2", "safetensors"])
def test_export_card_code_runs_the_file(to, runs):
    for module in FORMATS[to].needs:
        pytest.importorskip(module)
    folder = runs[1] / f"code-{to}"
    exported(runs, "global", "--tier", "small", "--to", to, "--out", folder)
    card = read_card(folder)
    code = usage_snippet(card)
    assert code in (folder / "card.md").read_text("utf-8")
    assert len([line for line in code.splitlines() if line]) <= 5
    space = {}
    with contextlib.chdir(folder):
        exec(compile(code, to, "exec"), space)
    assert tuple(space["logits"].shape) == (1, 10)


def test_export_stored_input_takes_any_batch_and_preprocesses(runs):
    card = exported(runs, "global", "--to", "pt2", "--out", "raw")
    prepared = exported(runs, "global", "--to", "pt2", "--input", "prepared", "--out", "prepared")
    assert (card["input"]["dtype"], prepared["input"]["dtype"]) == ("uint8", "float32")
    nets = [torch.export.load(runs[1] / name / "model.pt2").module() for name in ("raw", "prepared")]
    x = torch.randint(0, 256, (6, 1, 8, 8), dtype=torch.uint8)
    assert torch.allclose(nets[0](x), nets[1](x / 255), atol=1e-5)
    assert "255" in prepared["input"]["meaning"]


def test_export_device_model_evaluates_as_in_the_run(runs):
    card = exported(runs, "personal", "--device", "2", "--to", "safetensors")
    of_device = {"candidate": "personal", "device": "2", "metric": "accuracy"}
    for test in ("global", "local"):
        value = judged_last("personal", **of_device, test=test)
        assert card["evaluated"]["tests"][test]["accuracy"] == value
        assert card["measured"][test]["accuracy"] == pytest.approx(value)
    assert (card["device"], card["tier"]) == ("2", "small")
    net = package.load_model(runs[1] / "personal/exports/device-2-safetensors")
    assert net(torch.zeros(5, 1, 8, 8, dtype=torch.uint8)).shape == (5, 10)


def test_export_macs_is_the_largest_subnet_below_it(runs):
    whole = exported(runs, "supernet", "--to", "safetensors", "--out", "whole")
    small = exported(runs, "supernet", "--tier", "small", "--to", "safetensors", "--out", "least")
    budget = (whole["macs"] + small["macs"]) // 2
    card = exported(runs, "supernet", "--macs", budget, "--to", "safetensors", "--out", "between")
    assert small["macs"] < card["macs"] <= budget
    assert card["name"].startswith("mobilenet of macs-")
    alone = card["measured"]["global, one example at a time,"]
    assert 0 <= alone["accuracy"] <= 100
    assert any("statistics of the batch" in warning for warning in card["warnings"])


def test_export_text_shows_measurements(runs):
    result = runs[0]("export", "global", "--tier", "small", "--to", "safetensors", "--out", "shown")
    assert result.code == 0
    assert "exported file" in result.out and "MACs" in result.out and "largest difference" in result.out
    assert "shown/model.safetensors" in result.out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("global", "--to", "onnxx"), "FORMAT_NAME", "did you mean 'onnx'?"),
        (("global", "--tier", "smal", "--to", "pt2"), "TIER_NAME", "did you mean 'small'?"),
        (("global", "--device", "1", "--to", "pt2"), "DEVICE_MODEL", "--tier large"),
        (("personal", "--device", "9", "--to", "pt2"), "DEVICE_NAME", "devices are 0 to 3"),
        (("personal", "--tier", "small", "--to", "pt2"), "TIER_MODEL", "--device 0"),
        (("supernet", "--macs", "3", "--to", "pt2"), "BUDGET_SMALL", ""),
        (("nowhere", "--to", "pt2"), "RUN_FOLDER", ""),
        (("global", "--to", "pt2", "--out", "global"), "OUT_EXISTS", ""),
    ],
    ids=lambda one: one if isinstance(one, str) and one.isupper() else "",
)
def test_export_bad_choice_is_refused(arguments, code, words, runs):
    found = runs[0]("export", *arguments, "--format", "json")
    assert found.code == 4
    assert found.failure["error_code"] == code
    assert words in found.failure["message"] + found.failure["hint"]


def test_export_two_selectors_are_refused(runs):
    assert runs[0]("export", "global", "--tier", "small", "--device", "1", "--to", "pt2").code == 4
    assert runs[0]("export", "global", "--to", "pt2", "--input", "raw").code == 4


def test_export_missing_dependency_hint_is_the_extra(runs, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "executorch", None)
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "executorch" else found(name))
    result = runs[0]("export", "global", "--to", "executorch", "--format", "json")
    assert result.code == 4
    assert result.failure["error_code"] == "EXTRA_MISSING"
    assert result.failure["hint"] == "pip install 'fedloom[executorch]'"


def test_export_differing_outputs_are_refused_and_removed(runs, monkeypatch):
    """A runtime with wrong outputs."""
    from dataclasses import replace

    kind = FORMATS["safetensors"]

    def wrong(path, rebuilt):
        right = kind.open(path, rebuilt)
        return lambda x: right(x) + 1e-3

    monkeypatch.setitem(FORMATS._entries, "safetensors", replace(kind, open=wrong))
    result = runs[0]("export", "global", "--to", "safetensors", "--out", "differs", "--format", "json")
    assert result.code == 1
    assert result.failure["error_code"] == "NOT_THE_SAME"
    assert not (runs[1] / "differs").exists()


def test_export_unfinished_run_is_refused(runs):
    shutil.copytree(runs[1] / "global", runs[1] / "half")
    manifest = json.loads((runs[1] / "half/manifest.json").read_text("utf-8"))
    (runs[1] / "half/manifest.json").write_text(json.dumps({**manifest, "status": "running"}), encoding="utf-8")
    assert "resume" in runs[0]("export", "half", "--to", "pt2").err


def test_export_from_python_equals_the_command(runs, tmp_path):
    run = package.open_run(runs[1] / "global")
    columns = run.columns()
    assert list(columns) == ["round", "candidate", "tier", "device", "test", "metric", "value"]
    assert len(columns["value"]) == len(run.rows())
    net, x = run.model("small"), torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8)
    made = run.export("safetensors", "small", out=tmp_path / "small")
    assert torch.equal(package.load_model(made.folder)(x), net(x))
    assert run.model(device=None, macs=10**9)(x).shape == (4, 10)


def test_run_frame_with_pandas_holds_the_rows(runs):
    pandas = pytest.importorskip("pandas")
    frame = package.open_run(runs[1] / "global").to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert {"round", "tier", "value"} <= set(frame.columns)


def test_load_other_folder_is_refused(runs, tmp_path):
    from fedloom.recipe.errors import RecipeError

    with pytest.raises(RecipeError, match="EXPORT_FOLDER"):
        package.load_model(tmp_path)
    exported(runs, "global", "--to", "pt2", "--out", "graph")
    with pytest.raises(RecipeError, match="EXPORT_FORMAT"):
        package.load_model(runs[1] / "graph")
