"""fedloom init: a commented recipe that runs any method on the bundled data."""

import re
import tomllib
from dataclasses import fields

import pytest

from fedloom.methods import METHODS
from fedloom.recipe.load import dumps, load
from fedloom.recipe.registries import Registries
from fedloom.runs.folder import read_manifest

SHRINK = [
    word
    for change in ("rounds=1", "data.dataset=digits", "training.epochs=1", "training.batch_size=100", "data.devices=8")
    for word in ("--set", change)
]  # fmt: skip

WORDS = 'info = MethodInfo(paper="of my own", uploads="nothing")'
OWN_METHOD = """
from dataclasses import dataclass, field

from fedloom.fleet import tier_slices
from fedloom.methods import Method, MethodInfo


@dataclass(frozen=True)
class Mine(Method):
    {words}
    {settings}

    def start(self, fleet, seed, warm_start=None):
        return {{"weights": fleet.global_model.initial_weights(seed)}}

    def round(self, server, context):
        return server

    def eval_targets(self, server):
        return {{"server": tier_slices(server["weights"])}}


METHODS = {{"mine": Mine}}
"""


@pytest.mark.parametrize("method", METHODS)
def test_init_every_method_recipe_runs(method, fedloom, tmp_path):
    result = fedloom("init", method, "--out", "new.toml")
    assert (result.code, result.out, result.err) == (0, "new.toml\nnext: fedloom run new.toml\n", "")
    text = (tmp_path / "new.toml").read_text()
    assert text.startswith("# fedloom run new.toml\n")
    assert tomllib.loads(text)["method"]["name"] == method
    assert tomllib.loads(text)["data"]["dataset"] == "fashion-mini"
    assert METHODS[method].info.paper in text

    assert fedloom("check", "new.toml").code == 0
    smaller = {
        "columnnet": ["model.columns=[[2,2,2],[2,2,2],[2,2,2]]", "model.head.cells=1"],
        "convnet": ["model.hidden=[2,4]"],
        "splitnet": ["model.channels=2", "model.head.cells=1"],
        "preactresnet": ["model.hidden=[2,2,4,4]", "model.head.cells=1"],
    }[tomllib.loads(text)["model"]["family"]]
    changes = [part for change in smaller for part in ("--set", change)]
    ran = fedloom("run", "new.toml", *SHRINK, *changes, "--out", "run", "--format", "json")
    assert ran.code == 0
    assert read_manifest(tmp_path / "run")["status"] == "finished"


@pytest.mark.parametrize(
    ("method", "family", "lr"),
    [
        ("heterofl", "convnet", 0.4),
        ("fedavg", "convnet", 0.4),
        ("fedhen", "preactresnet", 0.1),
        ("fedin", "splitnet", 0.1),
        ("everytier", "columnnet", 0.4),
    ],
)
def test_init_every_net_has_the_common_head(method, family, lr, fedloom, tmp_path):
    assert fedloom("init", method, "--out", "new.toml").code == 0
    recipe = tomllib.loads((tmp_path / "new.toml").read_text())
    assert (recipe["model"]["family"], recipe["model"]["head"]) == (family, {"cells": 3})
    assert recipe["training"]["optimizer"]["lr"] == lr


@pytest.mark.parametrize("method", METHODS)
def test_init_commented_settings_are_the_defaults(method, fedloom, tmp_path):
    fedloom("init", method, "--out", "new.toml")
    text = (tmp_path / "new.toml").read_text()
    head, section, tail = re.split(r"(?<=\[method\]\n)|(?=\n\[evaluation\])", text)
    spelled_out = head + re.sub(r"^# (?=\w+ = )", "", section, flags=re.MULTILINE) + tail
    settings = load(tomllib.loads(spelled_out), Registries()).recipe.method.settings
    sample = METHODS[method].info.example_settings
    assert {name: dumps({name: value}) for name, value in settings.items() if name in sample} == {
        name: dumps({name: value}) for name, value in sample.items()
    }
    assert METHODS[method](**{n: v for n, v in settings.items() if n not in sample}) == METHODS[method]()
    assert set(settings) == {one.name for one in fields(METHODS[method]) if one.default is not None}


def test_init_homogeneous_method_gets_one_tier(fedloom, tmp_path):
    fedloom("init", "fedavg", "--out", "one.toml")
    fedloom("init", "heterofl", "--out", "three.toml")
    assert len(tomllib.loads((tmp_path / "one.toml").read_text())["tiers"]) == 1
    assert len(tomllib.loads((tmp_path / "three.toml").read_text())["tiers"]) == 3


def test_init_recipe_has_the_nets_and_messages_that_its_method_is_about(fedloom, tmp_path):
    def recipe(method):
        assert fedloom("init", method, "--out", f"{method}.toml").code == 0
        return tomllib.loads((tmp_path / f"{method}.toml").read_text())

    depthfl, scalefl, fedkd = recipe("depthfl"), recipe("scalefl"), recipe("fedkd")
    assert depthfl["model"]["exit_after"] == scalefl["model"]["exit_after"] == "every"
    assert [tier.get("stages") for tier in depthfl["tiers"]] == [None, 3, 2]
    assert [(tier.get("stages"), tier["width"]) for tier in scalefl["tiers"]] == [(None, 1.0), (3, 0.75), (2, 0.5)]
    assert [tier.get("family", fedkd["model"]["family"]) for tier in fedkd["tiers"]] == ["convnet", "mlp"]
    assert fedkd["compression"] == {"uplink": {"kind": "low_rank", "share": 0.5, "error_feedback": False}}


def test_init_json_names_the_file(fedloom, tmp_path):
    result = fedloom("init", "heterofl", "--format", "json")
    assert (result.code, result.data) == (0, {"recipe": "my.toml"})
    assert (tmp_path / "my.toml").is_file()


def test_init_existing_file_is_not_overwritten(fedloom, files, tmp_path):
    (tmp_path / "my.toml").write_text("mine")
    before = files()
    result = fedloom("init", "heterofl", "--out", "my.toml")
    (issue,) = result.issues
    assert (result.code, issue.where, issue.code) == (4, "--out", "OUT_EXISTS")
    assert issue.hint
    assert files() == before
    as_json = fedloom("init", "heterofl", "--format", "json")
    assert (as_json.code, as_json.failure["error_code"]) == (4, "OUT_EXISTS")


def test_init_unknown_method_is_refused(fedloom, files):
    result = fedloom("init", "hetrofl")
    (issue,) = result.issues
    assert (result.code, issue.code) == (4, "METHOD_NAME")
    assert issue.hint == "did you mean 'heterofl'?"
    assert files() == {}


@pytest.mark.parametrize(
    "settings",
    [
        "strength: float = 0.5",
        "strength: float | None = None",
        "strength: tuple[int, ...] = (1, 2)",
        "strength: dict[str, float] = field(default_factory=dict)",
        "pass",
    ],
    ids=["a number", "none", "a list", "a table", "no settings"],
)
def test_init_user_method_recipe_is_written(settings, fedloom, tmp_path):
    (tmp_path / "my.py").write_text(OWN_METHOD.format(words=WORDS, settings=settings))
    result = fedloom("init", "mine", "--with", "my.py", "--out", "new.toml")
    command = "fedloom run new.toml --with my.py"
    assert (result.code, result.out) == (0, f"new.toml\nnext: {command}\n")
    assert (tmp_path / "new.toml").read_text().startswith(f"# {command}\n")
    assert tomllib.loads((tmp_path / "new.toml").read_text())["method"] == {"name": "mine"}
    assert fedloom("check", "new.toml", "--with", "my.py").code == 0


def test_init_user_method_required_setting_is_named(fedloom, tmp_path):
    (tmp_path / "my.py").write_text(OWN_METHOD.format(words=WORDS, settings="strength: float"))
    result = fedloom("init", "mine", "--with", "my.py", "--out", "new.toml")
    assert (result.code, result.err) == (0, "")
    assert "strength" in (tmp_path / "new.toml").read_text()


@pytest.mark.parametrize("arguments", [["init", "mine"], ["list", "methods"]], ids=" ".join)
def test_init_user_method_without_info_works(arguments, fedloom, tmp_path):
    """It runs, so `list` and `init` work; only its description is missing."""
    (tmp_path / "my.py").write_text(OWN_METHOD.format(words="", settings="strength: float = 0.5"))
    result = fedloom(*arguments, "--with", "my.py")
    assert (result.code, result.err) == (0, "")
