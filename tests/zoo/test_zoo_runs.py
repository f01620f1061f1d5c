"""Modules that nobody wrote for fedloom: given by --with, trained, interrupted, resumed, exported."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import fedloom as fl
from fedloom.exporting import FORMATS
from fedloom.models import MODELS
from fedloom.models.structure import as_outputs
from fedloom.runs.folder import read_manifest
from fedloom.tensors import fingerprint
from tests.cli.conftest import CommandResult, fedloom  # noqa: F401 - a fixture
from tests.zoo import data, hub
from tests.zoo.cases import CASES, FAMILIES, names, zoo_model

HERE = Path(__file__).parent
Command = Callable[..., CommandResult]


def recipe(name: str, family: str = "") -> dict[str, Any]:
    return {
        "rounds": 2,
        "data": {"dataset": CASES[name].dataset, "devices": 4},
        "model": {"family": family or name, **CASES[name].settings},
        "tiers": [{"name": "all", "share": 1.0}],
        "training": {"batch_size": 8, "epochs": 2, "optimizer": {"kind": "adam", "lr": 0.01}},
        "method": {"name": "stopped"},
        "checkpoints": {"every": 1},
    }


def with_files(name: str) -> list[object]:
    module = HERE / ("hub.py" if name in hub.MODELS else "plain.py")
    return ["--with", module, "--with", HERE / "data.py"]


@pytest.fixture
def given(fedloom: Command, tmp_path: Path) -> Callable[[str], Callable[..., CommandResult]]:  # noqa: F811
    """Call the command with a module of the zoo; progress goes to stderr."""

    def give(name: str) -> Callable[..., CommandResult]:
        fl.Simulation.from_recipe(recipe(name), extensions=[str(one) for one in with_files(name)[1::2]]).to_recipe(
            tmp_path / "zoo.toml"
        )
        return lambda verb, *arguments: fedloom(verb, *arguments, *with_files(name))

    return give


def results_of(run: str) -> tuple[str, str]:
    return read_manifest(Path(run))["sha256"], (Path(run) / "rows.jsonl").read_text()


@pytest.mark.parametrize("name", names(quick=()))
def test_zoo_module_has_same_result_with_two_workers_and_after_interruption(
    name: str, given: Callable[[str], Callable[..., CommandResult]]
) -> None:
    command, case = given(name), CASES[name]
    done = command("run", "zoo.toml", "--out", "whole")
    assert done.code == 0, done.err
    slow = [line for line in done.err.splitlines() if "slower" in line]
    assert [line.partition("tier all")[2] for line in slow] == [
        f" trains one device at a time, which is slower: {reason}" for reason in [case.reason] if reason
    ]
    assert "Warning" not in done.err
    assert command("run", "zoo.toml", "--out", "two", "--workers", "2", "--quiet").code == 0
    Path("stop").touch()
    assert command("run", "zoo.toml", "--out", "part", "--quiet").code == 130
    Path("stop").unlink()
    assert command("resume", "part", "--quiet").code == 0
    assert results_of("two") == results_of("whole")
    assert results_of("part") == results_of("whole")


def plain_logits(name: str, run: str, x: Tensor) -> Tensor:
    """Of the module as its author would run it."""
    module = zoo_model(name).build(**dict(zoo_model(name).settings)).eval()
    problems = module.load_state_dict(load_file(Path(run) / "models" / "all.safetensors"), strict=False)
    assert not problems.unexpected_keys
    assert not set(problems.missing_keys) & {key for key, _ in module.named_parameters()}
    with torch.no_grad():
        return as_outputs(module(x)).logits


@pytest.mark.parametrize("name", names(quick=()))
def test_zoo_module_exported_to_onnx_and_pt2_computes_what_torch_computes(
    name: str, given: Callable[[str], Callable[..., CommandResult]]
) -> None:
    command, x = given(name), data.DATASETS[CASES[name].dataset]().test.x
    assert command("run", "zoo.toml", "--out", "run", "--quiet").code == 0
    expected = plain_logits(name, "run", x)
    assert expected.std(0).min() > 1e-3  # otherwise anything would agree
    for to in ("onnx", "pt2"):
        done = command("export", "run", "--to", to, "--out", to)
        assert done.code == 0, done.err
        file = FORMATS[to].open(Path(to) / f"model{FORMATS[to].suffix}", lambda: pytest.fail("the file has a graph"))
        with torch.no_grad():
            assert float((file(x) - expected).abs().max()) <= 1e-5


@pytest.mark.parametrize("name", ["lora_net", pytest.param("hf_lora", marks=pytest.mark.slow)])
def test_frozen_base_of_adapters_is_neither_trained_nor_sent(
    name: str, given: Callable[[str], Callable[..., CommandResult]]
) -> None:
    command, model = given(name), zoo_model(name)
    (tier,) = command("plan", "zoo.toml", "--format", "json").data["tiers"]
    adapters = sum(shape.numel() for shape in model.shapes().values())
    base = sum(shape.numel() for shape in model.frozen_shapes().values())
    assert (tier["bytes_down"], tier["bytes_up"]) == (4 * adapters, 4 * adapters)
    assert (tier["parameters"], tier["trained_parameters"]) == (adapters + base, adapters)
    assert command("run", "zoo.toml", "--out", "run", "--quiet").code == 0
    saved = load_file("run/models/all.safetensors")
    initial = dict(model.module(5).named_parameters())
    frozen = [key for key, weight in initial.items() if not weight.requires_grad]
    assert len(frozen) == len(model.frozen_shapes()) > 0
    assert all(torch.equal(saved[key], initial[key]) for key in frozen)
    assert all(not torch.equal(saved[key], model.initial_weights(0)[key]) for key in model.shapes())
    rounds = [json.loads(line) for line in Path("run/participation.jsonl").read_text().splitlines()]
    assert [(each["bytes_down"], each["bytes_up"]) for each in rounds] == [
        (4 * 4 * adapters, {"weights": 4 * 4 * adapters})
    ] * 2
    assert read_manifest(Path("run"))["frozen"] == {"all": fingerprint({"frozen": {key: saved[key] for key in frozen}})}


@pytest.mark.parametrize("name", ["vgg", "lora_net"])
def test_registered_zoo_module_is_a_family_like_any_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODELS, "_entries", dict(MODELS._entries))
    assert fl.models.register("mine", FAMILIES[name]) is FAMILIES[name]
    document = {**recipe(name, "mine"), "method": {"name": "fedavg"}, "rounds": 1}
    sim = fl.Simulation.from_recipe(document, extensions=[HERE / "data.py"])
    (result,) = sim.rounds()
    assert result.metrics["all"]["loss"] > 0
