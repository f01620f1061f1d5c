"""fedloom doctor: what this machine has, and pitfalls of a recipe."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedloom.cli.doctor import _blocks
from fedloom.models import build_model


def findings(result):
    assert (result.code, result.err) == (0, "")
    assert all(set(one) == {"name", "state", "detail"} for one in result.data)
    assert {one["state"] for one in result.data} <= {"ok", "warn"}
    return {one["name"]: (one["state"], one["detail"]) for one in result.data}


def test_doctor_without_recipe_shows_the_machine(fedloom, files):
    found = findings(fedloom("doctor", "--format", "json"))
    assert list(found) == ["python", "torch", "trains on", "cores", "folder for runs", "extras", "data"]
    assert found["data"][1].startswith("bundled data sets only: there is no data")
    assert files() == {}


def test_doctor_text_has_a_line_per_finding(fedloom):
    result = fedloom("doctor")
    assert (result.code, result.err) == (0, "")
    assert [line.split()[0] for line in result.out.splitlines()[1:]] == [
        "python", "torch", "trains", "cores", "folder", "extras", "data",
    ]  # fmt: skip


def test_doctor_machine_with_cuda_says_how_to_use_it(fedloom, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "T4")
    found = findings(fedloom("doctor", "--format", "json"))
    assert found["trains on"] == ("ok", "CPU; with --device also cuda:0 (T4)")
    assert "CUDA" not in found["torch"][1]


def test_doctor_machine_without_accelerator_trains_on_the_cpu(fedloom, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    found = findings(fedloom("doctor", "--format", "json"))
    assert found["trains on"] == ("ok", "CPU; torch finds nothing else")


@pytest.mark.parametrize("how", ["option", "variable"])
def test_doctor_data_folder_lists_data_sets(how, fedloom, tmp_path, monkeypatch):
    (tmp_path / "sets" / "cifar-10-batches-bin").mkdir(parents=True)
    (tmp_path / "sets" / "mine.npz").touch()
    (tmp_path / "sets" / "notes.txt").touch()
    monkeypatch.setenv("FEDLOOM_DATA", "elsewhere" if how == "option" else "sets")
    arguments = ["--data-dir", "sets"] if how == "option" else []
    found = findings(fedloom("doctor", *arguments, "--format", "json"))
    assert found["data"] == ("ok", "sets: cifar-10-batches-bin, mine.npz")


def test_doctor_recipe_with_pitfalls_warns(fedloom, write, files):
    write()
    before = files()
    found = findings(fedloom("doctor", "my.toml", "--format", "json"))
    assert found["recipe"] == ("ok", "my.toml")
    assert found["batch norm"][0] == "warn"
    assert "pooled" in found["batch norm"][1]
    assert found["tier large"] == found["tier small"] == ("ok", "many devices run as one network")
    assert "tiers" not in found
    assert files() == before


@pytest.mark.parametrize(
    ("devices", "state", "words"), [(4, "warn", "fewer than 10 devices"), (20, "ok", "devices' own sums")]
)
def test_doctor_batch_norm_per_device_depends_on_fleet_size(devices, state, words, fedloom, write):
    write(("[method]", "[evaluation]\nstatistics = { query = 'per_device' }\n\n[method]"))
    found = findings(fedloom("doctor", "my.toml", "--set", f"data.devices={devices}", "--format", "json"))
    assert found["batch norm"][0] == state
    assert words in found["batch norm"][1]


def test_doctor_recipe_without_pitfalls_has_no_findings(fedloom, write):
    write(("hidden = [2, 4]", "hidden = [2, 4]\nnormalization = 'group'"))
    found = findings(fedloom("doctor", "my.toml", "--set", "engine.devices_per_block=1", "--format", "json"))
    assert not found.keys() & {"batch norm", "tier large", "tier small", "tiers"}


def test_doctor_tier_without_devices_warns(fedloom, write):
    write(
        ("share = 0.5\nwidth = 1.0", "share = 0.1\nwidth = 1.0"),
        ("share = 0.5\nwidth = 0.5", "share = 0.9\nwidth = 0.5"),
    )
    found = findings(fedloom("doctor", "my.toml", "--format", "json"))
    assert found["tiers"][0] == "warn"
    assert "no device in large" in found["tiers"][1]


def test_doctor_bad_recipe_is_refused(fedloom, write):
    write(("rounds = 2", "rounds = 0"))
    result = fedloom("doctor", "my.toml", "--format", "json")
    assert (result.code, result.failure["error_code"]) == (4, "RECIPE_RANGE")


@pytest.mark.parametrize(("scaler", "warned"), [("true", True), ("false", False)])
def test_doctor_scaler_without_norm_warns(scaler, warned, fedloom, write):
    write()
    change = ("--set", "model.normalization=none", "--set", f"model.scaler={scaler}")
    assert ("evaluated unscaled" in fedloom("doctor", "my.toml", *change).out) == warned
    assert "evaluated unscaled" not in fedloom("doctor", "my.toml").out


def layers(kind):
    return {
        "dropout": nn.Sequential(nn.Linear(6, 4), nn.Dropout(), nn.Linear(4, 4)),
        "softmax": nn.Sequential(nn.Linear(6, 4), nn.Softmax(1), nn.Linear(4, 4)),
        "rrelu": nn.Sequential(nn.Linear(6, 4), nn.RReLU(), nn.Linear(4, 4)),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "state", "detail"),
    [
        ("dropout", "ok", "many devices run as one network"),
        (
            "softmax",
            "ok",
            "many devices run at once by vmap, which is slower than folding; Sequential cannot be folded: devices mix",
        ),
        (
            "rrelu",
            "warn",
            "trains one device at a time, which is slower: "
            "1 (RReLU) uses rrelu, which torch cannot run for many devices at once",
        ),
    ],
)
def test_doctor_says_how_many_devices_of_a_tier_run(kind, state, detail):
    tier = SimpleNamespace(name="small", model=build_model("layers", layers, {"kind": kind}, (6,), 4))
    recipe = SimpleNamespace(engine=SimpleNamespace(devices_per_block=None))
    assert _blocks(recipe, SimpleNamespace(tiers=[tier])) == [("tier small", state, detail)]
