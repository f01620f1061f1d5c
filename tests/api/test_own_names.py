"""A run remembers the files and objects it was made with, and says so where they are missing or have changed."""

import hashlib
import logging
from pathlib import Path

import pytest

import fedloom as fl
from fedloom.footprints import Rule

SOURCE = """
from dataclasses import dataclass

from fedloom.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Mine(FedAvg):
    part: float = 0.5


METHODS = {"mine": Mine}
"""
RECIPE = """
rounds = 2
data = { dataset = "digits", devices = 2, max_examples = 20, test_examples = 20 }
model = { family = "convnet", hidden = [2, 2] }
tiers = [{ name = "all", share = 1.0 }]
method = { name = "mine" }
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with a finished run, an interrupted one, and the file that both need."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    Path("recipe.toml").write_text(RECIPE)
    Path("my_method.py").write_text(SOURCE)
    fl.run("recipe.toml", out="run", extensions=["my_method.py"], progress=False)
    sim = fl.Simulation.from_recipe("recipe.toml", extensions=["my_method.py"])
    next(sim.rounds())
    sim._stop("")
    sim.folder.rename("cut")
    return tmp_path


def test_manifest_names_files_with_sha256(home):
    digest = hashlib.sha256(SOURCE.encode()).hexdigest()
    manifest = fl.open_run("run").manifest
    path = str((home / "my_method.py").resolve())
    assert manifest["with_files"] == [{"name": "my_method.py", "path": path, "sha256": digest}]
    assert manifest["own_names"] == {"methods": ["mine"]}


VERBS = {
    "verify": lambda **names: fl.verify("run", **names),
    "resume": lambda **names: fl.resume("cut", progress=False, **names),
    "simulation": lambda **names: fl.Simulation.resume("cut", **names).rounds(),
    "export": lambda **names: fl.export("run", "safetensors", **names),
    "subnet": lambda **names: fl.subnet("run", count=1, examples=5, **names),
    "audit": lambda **names: fl.audit("run", **names),
    "cka": lambda **names: fl.cka("run", "run", examples=4, **names),
    "model": lambda **names: fl.open_run("run", **names).model(),
}


def test_verbs_without_the_file_say_which_one_is_missing(home):
    for act in VERBS.values():
        with pytest.raises(fl.RecipeError) as caught:
            act()
        issue = caught.value.issues[0]
        digest = hashlib.sha256(SOURCE.encode()).hexdigest()
        assert issue.message.startswith(f"this run was made with my_method.py (sha256 {digest[:12]}…), where its names")
        assert [one.code for one in caught.value.issues] == ["WITH_MISSING"]  # and no name that is like the missing one
        assert issue.hint.startswith(f"pass --with {home.resolve() / 'my_method.py'}; in Python extensions=[")
    assert "Mine" not in vars(fl)


def test_verbs_with_the_file_work(home):
    for name in ("verify", "resume", "export", "cka", "model"):
        VERBS[name](extensions=["my_method.py"])
    assert fl.open_run("cut").manifest["sha256"] == fl.open_run("run").manifest["sha256"]


def test_missing_file_is_named_without_its_path(home, fedloom):
    Path("my_method.py").rename("elsewhere.py")
    refused = fedloom("verify", "run", "--format", "json")
    assert refused.code == 4
    assert refused.failure["error_code"] == "WITH_MISSING" and refused.failure["hint"].startswith(
        "pass --with my_method.py;"
    )
    assert f"which is no longer at {home.resolve() / 'my_method.py'}" in refused.failure["message"]


def test_changed_file_is_used_with_a_warning(home, caplog):
    Path("my_method.py").write_text(SOURCE + "\n# changed\n")
    with caplog.at_level(logging.WARNING, "fedloom"):
        assert not fl.verify("run", extensions=["my_method.py"]).differences
    (warning,) = caplog.messages
    assert "my_method.py has changed since run was made with it: sha256" in warning


def test_report_needs_no_file(home):
    assert fl.report("run").is_file()


class Quiet(Rule):
    def aggregate(self, old, values, contributors):
        return old


def test_run_of_objects_says_what_is_missing(make):
    sim = make(aggregation=Quiet(), rounds=1)
    list(sim.rounds())
    run = sim.save("run")
    assert run.manifest["own_names"] == {"aggregation": ["quiet"]} and run.manifest["with_files"] == []
    assert run.model("small") is not None  # the run of a simulation knows its names
    with pytest.raises(fl.RecipeError) as caught:
        fl.open_run("run").model("small")
    issue = caught.value.issues[0]
    assert (
        issue.code == "NAMES_MISSING"
        and issue.message == "this run was made with objects of its own: aggregation quiet"
    )
    assert fl.open_run("run", registries=sim.registries).model("small") is not None


def test_built_in_names_are_not_remembered(make):
    sim = make(rounds=1)
    list(sim.rounds())
    assert (sim.run.manifest["own_names"], sim.run.manifest["with_files"]) == ({}, [])


def test_comparison_remembers_files_too(home):
    compared = fl.compare(
        "recipe.toml",
        controls=["standalone"],
        sets=["rounds=1"],
        out="both",
        extensions=["my_method.py"],
        progress=False,
    )
    (first,) = compared.runs("mine")
    assert first.model() is not None and first.registries.files
    with pytest.raises(KeyError, match="there is no arm 'yours'"):
        compared.runs("yours")
    with pytest.raises(fl.RecipeError, match=r"this run was made with my_method\.py"):
        fl.resume("both")
