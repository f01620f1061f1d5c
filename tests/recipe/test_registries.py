"""Methods, model families and data sets that a user passes to fedloom.run."""

import functools
import importlib.util
import sys

import pytest
import torch
from safetensors.torch import load_file

import fedloom
from fedloom.recipe.errors import RecipeError
from fedloom.recipe.registries import Registries

METHOD = """
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedloom.fleet import tier_slices
from fedloom.footprints import ClientUpdate
from fedloom.methods import Method, MethodInfo
from fedloom.client import ClientResult, fit, label_loss, like, on_device


@dataclass(frozen=True)
class Mine(Method):
    info = MethodInfo(paper="none yet", uploads="weights")

    part: float = 1.0
    order: Literal["first", "last"] = "first"

    def start(self, fleet, seed, warm_start=None):
        return {"weights": warm_start or fleet.global_model.initial_weights(seed)}

    def round(self, server, context):
        asked = context.cohort[:1] if self.order == "first" else context.cohort[-1:]
        replies = context.ask(self.train, {d: {"weights": d.footprint.read(server["weights"])} for d in asked})
        updates = [ClientUpdate(r.device.footprint, r.upload["weights"], self.part) for r in replies]
        return {"weights": context.aggregate(server["weights"], updates)}

    @on_device(sends={"weights": like("weights")})
    def train(self, client, inbox):
        return ClientResult(upload={"weights": fit(client, inbox["weights"], label_loss(client))})

    def eval_targets(self, server):
        return {"server": tier_slices(server["weights"])}
"""

MODEL = """
from __future__ import annotations

from torch import nn


def perceptron(*, input_shape: tuple[int, ...], classes: int, units: tuple[int, ...] = (6,), width: float = 1.0):
    sizes = [64, *(max(1, round(size * width)) for size in units)]
    layers = [layer for a, b in zip(sizes, sizes[1:]) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(sizes[-1], classes))
"""

DATA = """
import torch

from fedloom.data import Dataset, Examples, Preparation


def load(classes: int = 3) -> Dataset:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (120, 1, 8, 8), dtype=torch.uint8, generator=draw)
    y = torch.arange(120) % classes
    return Dataset("mine", Examples(x[:90], y[:90]), Examples(x[90:], y[90:]), classes, Preparation())
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module from a file outside the package."""

    def make(name, source):
        (tmp_path / f"{name}.py").write_text(source)
        spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return make


def test_registry_user_method_runs(module, document, tmp_path):
    names = {"registries": Registries().with_names(methods={"mine": module("my_method", METHOD).Mine})}
    runs = {
        order: fedloom.run(document(method={"name": "mine", "order": order}), out=tmp_path / order, **names)
        for order in ("first", "last")
    }
    for run in runs.values():
        assert {(one.candidate, one.tier) for one in run.final} == {("server", "large"), ("server", "small")}
    moved = {order: {row.value for row in run.rows() if row.metric == "bytes_up"} for order, run in runs.items()}
    assert moved == {"first": {4 * 158}, "last": {4 * 66}}


def test_registry_user_model_family_runs(module, document, tmp_path):
    family = module("my_model", MODEL).perceptron
    run = fedloom.run(
        document(model={"family": "perceptron", "units": [8, 4]}, rounds=1),
        registries=Registries().with_names(models={"perceptron": family}), out=tmp_path / "run",
    )  # fmt: skip
    large, small = (load_file(run.folder / "models" / f"{tier}.safetensors") for tier in ("large", "small"))
    assert {name: tuple(weight.shape) for name, weight in small.items()} == {
        "1.weight": (4, 64), "1.bias": (4,), "3.weight": (2, 4), "3.bias": (2,), "5.weight": (10, 2), "5.bias": (10,),
    }  # fmt: skip
    assert torch.equal(large["3.weight"][:2, :4], small["3.weight"])


def test_registry_user_dataset_with_option_runs(module, document, tmp_path):
    run = fedloom.run(
        document(data={"dataset": "mine", "classes": 5, "devices": 3}, rounds=1),
        registries=Registries().with_names(datasets={"mine": module("my_data", DATA).load}), out=tmp_path / "run",
    )  # fmt: skip
    large = load_file(run.folder / "models" / "large.safetensors")
    assert large["classifier.weight"].shape == (5, 4)


def test_registry_user_method_model_and_dataset_run_together(module, document, tmp_path):
    run = fedloom.run(
        document(
            data={"dataset": "mine", "devices": 3}, model={"family": "perceptron"}, method={"name": "mine"}, rounds=1
        ),
        registries=Registries().with_names(
            methods={"mine": module("my_method", METHOD).Mine},
            models={"perceptron": module("my_model", MODEL).perceptron},
            datasets={"mine": module("my_data", DATA).load},
        ),
        out=tmp_path / "run",
    )
    assert run.final


@pytest.mark.parametrize(
    ("changes", "key_path", "hint"),
    [
        ({"method": {"name": "mine", "prt": 1.0}}, ("method", "prt"), "part"),
        ({"method": {"name": "mine", "order": "frst"}}, ("method", "order"), "first"),
        ({"model": {"family": "perceptron", "unit": [3]}}, ("model", "unit"), "units"),
        ({"model": {"family": "perceptron", "units": ["3"]}}, ("model", "units", 0), ""),
        ({"data": {"dataset": "mine", "classs": 4}}, ("data", "classs"), "classes"),
    ],
)
def test_registry_user_settings_are_validated(changes, key_path, hint, module, document, tmp_path):
    with pytest.raises(RecipeError) as caught:
        fedloom.run(
            document(**changes),
            registries=Registries().with_names(
                methods={"mine": module("my_method", METHOD).Mine},
                models={"perceptron": module("my_model", MODEL).perceptron},
                datasets={"mine": module("my_data", DATA).load},
            ),
            out=tmp_path / "run",
        )
    (issue,) = caught.value.issues
    assert issue.key_path == key_path
    assert hint in issue.hint
    assert not (tmp_path / "run").exists()


def test_registry_user_names_leave_defaults_unchanged(module, document, tmp_path):
    before = Registries()
    fedloom.run(
        document(data={"dataset": "digits", "devices": 3}, rounds=1),
        registries=before.with_names(datasets={"digits": module("my_data", DATA).load}), out=tmp_path / "run",
    )  # fmt: skip
    assert Registries() == before
    assert load_file(tmp_path / "run" / "models" / "large.safetensors")["classifier.weight"].shape == (3, 4)


def test_registry_partial_function_is_a_family(module, document, tmp_path):
    """A family derived from another with functools.partial."""
    narrow = functools.partial(module("my_model", MODEL).perceptron, units=(2,))
    registries = Registries().with_names(models={"narrow": narrow})
    run = fedloom.run(document(model={"family": "narrow"}, rounds=1), registries=registries, out=tmp_path / "run")
    assert load_file(run.folder / "models" / "large.safetensors")["1.weight"].shape == (2, 64)


def test_registry_class_is_a_family(document, tmp_path):
    class Linear(torch.nn.Module):
        def __init__(self, *, classes: int, bias: bool = True):
            super().__init__()
            self.last = torch.nn.Linear(64, classes, bias=bias)

        def forward(self, x):
            return self.last(x.flatten(1))

    run = fedloom.run(
        document(model={"family": "linear", "bias": False}, tiers=[{"name": "all", "share": 1.0}], rounds=1),
        registries=Registries().with_names(models={"linear": Linear}), out=tmp_path / "run",
    )  # fmt: skip
    assert set(load_file(run.folder / "models" / "all.safetensors")) == {"last.weight"}
