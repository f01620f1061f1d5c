"""A user's model on a frozen base that a file holds, from plan to export."""

import pytest
import torch
from safetensors.torch import load_file

from fedloom.runs.checkpoint import FOLDER, Checkpoints
from fedloom.runs.folder import read_manifest

BASE, RANKS = 64 * 16 + 16, {"large": 8, "small": 2}

MINE = """
from pathlib import Path

import torch
from torch import nn

from fedloom.methods import METHODS as KNOWN


class Stopped(KNOWN["heterofl"]):
    def round(self, server, context):
        if context.number == 3 and Path("stop").exists():
            raise KeyboardInterrupt
        return super().round(server, context)


class Adapted(nn.Module):
    def __init__(self, classes, rank):
        super().__init__()
        self.base, self.classifier = nn.Linear(64, 16), nn.Linear(16, classes)
        self.base.load_state_dict(torch.load("base.pt", weights_only=True))
        self.base.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(rank, 64) / 8), nn.Parameter(torch.zeros(16, rank))

    def forward(self, x):
        x = x.flatten(1)
        return self.classifier((self.base(x) + x @ self.down.mT @ self.up.mT).relu())


def adapted(*, classes: int, rank: int = 8) -> nn.Module:
    return Adapted(classes, rank)


MODELS = {"adapted": adapted}
METHODS = {"stopped": Stopped}
"""


def trained(rank):
    return 16 * 10 + 10 + rank * (64 + 16)


@pytest.fixture
def recipe(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(MINE)
    torch.manual_seed(1)
    torch.save(torch.nn.Linear(64, 16).state_dict(), tmp_path / "base.pt")
    return write(
        ("rounds = 2", "rounds = 3\n[checkpoints]\nevery = 1\n"),
        ('family = "convnet"\nhidden = [2, 4]', 'family = "adapted"'),
        ("width = 1.0", "rank = 8"), ("width = 0.5", "rank = 2"),
        ("batch_size = 100", 'batch_size = 100\noptimizer = { kind = "sgd", lr = 0.1, weight_decay = 0.01 }'),
    )  # fmt: skip


def test_plan_frozen_base_is_neither_trained_nor_sent(recipe, fedloom):
    result = fedloom("plan", recipe, "--with", "own.py", "--format", "json")
    for tier in result.data["tiers"]:
        rank = RANKS[tier["name"]]
        assert (tier["trained_parameters"], tier["parameters"]) == (trained(rank), trained(rank) + BASE)
        assert tier["bytes_down"] == 4 * trained(rank)
        assert tier["bytes_up"] == 4 * trained(rank) + 2  # and which of ten labels it has
        assert tier["macs"] == 64 * 16 + rank * (64 + 16) + 160
    assert "trained parameters" in fedloom("plan", recipe, "--with", "own.py").out


def test_run_on_frozen_base_keeps_it_in_models_and_exports(recipe, fedloom, tmp_path):
    assert fedloom("run", recipe, "--with", "own.py", "--out", "run", "--quiet").code == 0
    base = torch.load("base.pt", weights_only=True)
    for tier in RANKS:
        saved = load_file(f"run/models/{tier}.safetensors")
        assert all(torch.equal(saved[f"base.{name}"], weight) for name, weight in base.items())
    hashes = read_manifest(tmp_path / "run")["frozen"]
    assert list(hashes) == ["large", "small"]
    assert hashes["large"] == hashes["small"]
    server = Checkpoints(tmp_path / "run" / FOLDER).read_newest().server
    assert set(server["weights"]) == {"down", "up", "classifier.weight", "classifier.bias"}
    assert (
        fedloom("export", "run", "--tier", "small", "--to", "safetensors", "--with", "own.py", "--out", "out").code == 0
    )
    exported = load_file("out/model.safetensors")
    assert torch.equal(exported["net.base.weight"], base["weight"])
    card = (tmp_path / "out" / "card.md").read_text()
    assert f"{trained(2) + BASE:,}, of which {trained(2):,} were trained" in card


def test_run_that_was_stopped_goes_on_with_the_same_bits(recipe, fedloom, tmp_path):
    arguments = recipe, "--with", "own.py", "--quiet", "--set", 'method.name="stopped"', "--out"
    assert fedloom("run", *arguments, "whole").code == 0
    (tmp_path / "stop").touch()
    assert fedloom("run", *arguments, "part").code == 130
    (tmp_path / "stop").unlink()
    assert fedloom("resume", "part", "--with", "own.py", "--quiet").code == 0
    assert read_manifest(tmp_path / "part")["sha256"] == read_manifest(tmp_path / "whole")["sha256"]


def test_changed_base_is_refused_by_name(recipe, fedloom, tmp_path):
    assert fedloom("run", recipe, "--with", "own.py", "--out", "run", "--quiet").code == 0
    base = torch.load("base.pt", weights_only=True)
    torch.save({**base, "weight": base["weight"] + 1}, "base.pt")
    for command in (("verify", "run"), ("export", "run", "--to", "safetensors")):
        refused = fedloom(*command, "--with", "own.py")
        assert refused.code == 4
        assert "BASE_CHANGED: the frozen weights of tier 'large' have changed" in refused.err
    refused = fedloom("run", recipe, "--with", "own.py", "--out", "again", "--set", 'start.from="run"')
    assert refused.code == 4
    assert "START_BASE" in refused.err


FOURIER = MINE.replace("x = x.flatten(1)", "x = torch.fft.fft(x.flatten(1)).real")


def test_plan_names_operations_that_it_cannot_count(recipe, fedloom, tmp_path):
    (tmp_path / "own.py").write_text(FOURIER)
    result = fedloom("plan", recipe, "--with", "own.py", "--format", "json")
    assert [tier["uncounted"] for tier in result.data["tiers"]] == [["aten._fft_r2c"]] * 2
    text = fedloom("plan", recipe, "--with", "own.py").out
    assert "MACs of large are without aten._fft_r2c: how many those take is not known" in text


def test_privacy_noises_only_what_is_trained(recipe, fedloom, tmp_path):
    settings = (
        'fleet={sampling="poisson",participation=0.9}', "privacy={clip=1.0,noise=1.0,delta=1e-3}",
        'method={name="heterofl",only_seen_rows=false,weighting="uniform"}',
    )  # fmt: skip
    sets = [word for one in settings for word in ("--set", one)]
    done = fedloom("run", recipe, "--with", "own.py", "--out", "run", "--quiet", *sets)
    assert (done.code, done.issues) == (0, [])
    base = torch.load("base.pt", weights_only=True)
    assert torch.equal(load_file("run/models/small.safetensors")["base.weight"], base["weight"])
    assert "base.weight" not in Checkpoints(tmp_path / "run" / FOLDER).read_newest().server["weights"]
