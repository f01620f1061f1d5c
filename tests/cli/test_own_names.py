"""A user's own method, model family and data set, from a file outside the package, by --with."""

import tomllib

import pytest
from safetensors.torch import load_file

from fedloom.runs.folder import read_manifest

MINE = '''
"""My own method, model and data set."""

from dataclasses import dataclass

import torch
from torch import nn

from fedloom.data import Dataset, Examples, Preparation
from fedloom.fleet import tier_slices
from fedloom.footprints import ClientUpdate
from fedloom.methods import Method, MethodInfo
from fedloom.client import ClientResult, fit, label_loss, like, on_device


@dataclass(frozen=True)
class Mine(Method):
    """Moves only a part of the way to the mean."""

    info = MethodInfo(paper="none yet", uploads="weights")

    part: float = 0.5

    def start(self, fleet, seed, warm_start=None):
        return {"weights": warm_start or fleet.global_model.initial_weights(seed)}

    def round(self, server, context):
        old = server["weights"]
        replies = context.ask(self.train, {d: {"weights": d.footprint.read(old)} for d in context.cohort})
        new = context.aggregate(old, [ClientUpdate(r.device.footprint, r.upload["weights"], 1.0) for r in replies])
        return {"weights": {name: old[name] + self.part * (new[name] - old[name]) for name in old}}

    @on_device(sends={"weights": like("weights")})
    def train(self, client, inbox):
        return ClientResult(upload={"weights": fit(client, inbox["weights"], label_loss(client))})

    def eval_targets(self, server):
        return {"server": tier_slices(server["weights"])}


def perceptron(*, input_shape: tuple[int, ...], classes: int, units: int = 6, width: float = 1.0) -> nn.Module:
    middle = max(1, round(units * width))
    return nn.Sequential(nn.Flatten(), nn.Linear(25, middle), nn.ReLU(), nn.Linear(middle, classes))


def patches(*, count: int = 40) -> Dataset:
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(2 * count) % 3
    x = torch.randint(0, 80, (2 * count, 1, 5, 5), generator=draw) + 80 * y.view(-1, 1, 1, 1)
    half = [Examples(x.to(torch.uint8)[part], y[part]) for part in (slice(0, count), slice(count, None))]
    return Dataset("patches", *half, classes=3, preparation=Preparation())


METHODS = {"mine": Mine}
MODELS = {"perceptron": perceptron}
DATASETS = {"patches": patches}
'''

RECIPE = """
rounds = 2

[data]
dataset = "patches"
count = 24
devices = 4

[model]
family = "perceptron"
units = 4

[[tiers]]
name = "large"
share = 0.5

[[tiers]]
name = "small"
share = 0.5
width = 0.5

[method]
name = "mine"
part = 0.25
"""


@pytest.fixture
def own(tmp_path):
    """A recipe that uses these names, and the options that add them."""
    (tmp_path / "my.py").write_text(MINE)
    (tmp_path / "own.toml").write_text(RECIPE)
    return ["own.toml", "--with", "my.py"]


def test_run_user_names_are_used(own, fedloom, tmp_path):
    result = fedloom("run", *own, "--out", "run", "--format", "json")
    assert result.code == 0
    assert {(one["candidate"], one["tier"]) for one in result.data["final"]} == {
        ("server", "large"),
        ("server", "small"),
    }
    assert read_manifest(tmp_path / "run")["status"] == "finished"
    assert load_file(tmp_path / "run" / "models" / "small.safetensors")["1.weight"].shape == (2, 25)
    written = tomllib.loads((tmp_path / "run" / "recipe.toml").read_text())
    assert written["method"] == {"name": "mine", "part": 0.25}
    assert written["data"]["count"] == 24


def test_run_user_method_settings_take_effect(own, fedloom, tmp_path):
    assert fedloom("run", *own, "--out", "some", "--set", "rounds=1").code == 0
    assert fedloom("run", *own, "--out", "none", "--set", "rounds=1", "--set", "method.part=0.0").code == 0
    assert fedloom("run", *own, "--out", "never", "--set", "rounds=3", "--set", "method.part=0.0").code == 0
    sums = {name: read_manifest(tmp_path / name)["sha256"] for name in ("some", "none", "never")}
    assert sums["none"] == sums["never"] != sums["some"]


@pytest.mark.parametrize(
    ("change", "what", "hint"),
    [
        ("method.prt=0.5", "method.prt = 0.5", "part"),
        ("method.part=half", "method.part = 'half'", ""),
        ("model.unit=3", "model.unit = 3", "units"),
        ("data.cont=3", "data.cont = 3", "count"),
    ],
)
def test_run_user_settings_are_checked_by_signature(change, what, hint, own, fedloom):
    result = fedloom("run", *own, "--set", change)
    (issue,) = result.issues
    assert (result.code, issue.what) == (4, what)
    assert hint in issue.hint


def test_every_verb_user_names_are_known(own, fedloom):
    large, small = fedloom("plan", *own, "--format", "json").data["tiers"]
    assert large["parameters"] == 26 * 4 + 5 * 3
    assert small["parameters"] == 26 * 2 + 3 * 3
    assert large["bytes_up"] == large["bytes_down"] == 4 * large["parameters"]
    assert fedloom("check", *own).code == 0
    assert fedloom("doctor", *own).code == 0
    for what, name in (("methods", "mine"), ("models", "perceptron"), ("datasets", "patches")):
        assert fedloom("list", what, "--with", "my.py", "--format", "json").data[-1]["name"] == name


def test_compare_user_names_run_with_all_controls(own, fedloom):
    result = fedloom("compare", *own, "--out", "out", "--set", "rounds=1", "--format", "json")
    assert result.code == 0
    assert [one["arm"] for one in result.data["arms"]] == [
        "mine", "standalone", "small-for-all", "drop-the-small", "all-large",
    ]  # fmt: skip


def test_run_user_names_without_file_are_unknown(own, fedloom):
    result = fedloom("run", "own.toml")
    assert result.code == 4
    assert {(one.what, one.code) for one in result.issues} >= {
        ("method.name = 'mine'", "RECIPE_NAME"),
        ("model.family = 'perceptron'", "RECIPE_NAME"),
        ("data.dataset = 'patches'", "RECIPE_NAME"),
    }


def test_with_several_files_the_last_wins(own, fedloom, tmp_path):
    (tmp_path / "first.py").write_text("from fedloom.methods.fedavg import FedAvg\nMETHODS = {'mine': FedAvg}\n")
    result = fedloom("plan", "own.toml", "--with", "first.py", "--with", "my.py")
    assert result.code == 0
    other_way_round = fedloom("plan", "own.toml", "--with", "my.py", "--with", "first.py")
    assert other_way_round.code == 4
    assert [one.what for one in other_way_round.issues] == ["method.part = 0.25"]


def test_with_bundled_name_is_overridden(own, fedloom, tmp_path):
    """The user's `digits` replaces the bundled one, so its own shape counts."""
    (tmp_path / "my.py").write_text(MINE + "\nDATASETS = {'digits': patches}\n")
    result = fedloom("plan", *own, "--set", "data.dataset=digits", "--format", "json")
    assert result.code == 0
    assert result.data["tiers"][0]["parameters"] == 26 * 4 + 5 * 3


def test_run_user_model_build_error_is_a_recipe_issue(own, fedloom, tmp_path, files):
    (tmp_path / "my.py").write_text(MINE.replace("nn.Linear(25, middle)", "nn.Linear('25', middle)"))
    before = files()
    result = fedloom("run", *own)
    (issue,) = result.issues
    assert (result.code, issue.code) == (4, "MODEL_BUILD")
    assert "perceptron cannot be built for tier 'large'" in issue.message
    assert files() == before


@pytest.mark.parametrize(
    ("old", "new"),
    [("nn.Linear(25, middle)", "nn.Linear(24, middle)"), ("nn.Linear(middle, classes)", "nn.Linear(middle, 2)")],
    ids=["inputs", "outputs"],
)
@pytest.mark.parametrize("verb", ["run", "check", "plan"])
def test_user_model_unfitting_data_is_a_recipe_issue(verb, old, new, own, fedloom, tmp_path, files):
    """It can be built, but does not map the images to one number per class."""
    (tmp_path / "my.py").write_text(MINE.replace(old, new))
    before = files()
    result = fedloom(verb, *own)
    assert result.code == 4
    assert [one.code for one in result.issues] == ["MODEL_BUILD"]
    assert files() == before


def test_run_user_reader_exception_is_user_code(own, fedloom, tmp_path):
    (tmp_path / "my.py").write_text(MINE.replace("    draw = torch", "    raise LookupError('lost')\n    draw = torch"))
    result = fedloom("run", *own, "--format", "json")
    assert result.code == 1
    assert result.failure["error_code"] == "USER_CODE"
    assert result.failure["message"] == "LookupError: lost"
