"""Open tables of names: registered from Python, by an installed package, or by a file."""

import importlib
import json
import sys
from pathlib import Path

import pytest

import fedloom as fl
from fedloom.recipe.registries import KINDS, Registries
from fedloom.registry import Choice, EntryPointError, Layered, Registry, find_name, freeze
from tests.cli.conftest import call


def plain(lr: float = 0.1):
    """Steps downhill. Always."""


def other():
    """Does nothing."""


@pytest.fixture
def registry():
    return Registry("things", {"plain": plain, "top-k": other})


def test_register_as_function_and_decorator_returns_the_entry(registry):
    assert registry.register("mine", other) is other

    @registry.register("yours")
    def yours():
        """Is yours."""

    assert registry["mine"] is other and registry["yours"] is yours
    assert list(registry) == ["plain", "top-k", "mine", "yours"] and len(registry) == 4
    assert [registry.source(name) for name in ("plain", "mine")] == ["built in", "registered"]


def test_register_taken_name_is_refused_unless_replaced(registry):
    with pytest.raises(ValueError, match=r"there is already things\.plain; pass replace=True to replace it"):
        registry.register("plain", other)
    registry.register("plain", plain)  # the same again, as when a notebook's cell is run twice
    registry.register("plain", other, replace=True)
    assert registry["plain"] is other and registry.source("plain") == "registered"


def test_entries_are_attributes_with_underscores(registry):
    assert getattr(registry, "top_k").name == "top-k"  # noqa: B009
    assert registry.top_k() == Choice("things", "top-k")
    assert dir(registry) == sorted(["plain", "top_k", "register"])
    assert registry.plain.summary == "Steps downhill." and registry.plain(lr=0.5).settings == {"lr": 0.5}
    with pytest.raises(AttributeError, match=r"there is no things\.plan; did you mean 'plain'\?"):
        registry.plan  # noqa: B018
    with pytest.raises(KeyError):
        registry["plan"]


def test_layered_names_win_and_keep_their_order(registry):
    layered = Layered({"plain": other, "new": plain}, registry)
    assert list(layered) == ["plain", "top-k", "new"] and layered["plain"] is other and layered["top-k"] is other
    assert len(layered) == 3 and "new" in layered and "none" not in layered
    again = Layered({"newer": other}, layered)
    assert again.entries() == {"plain": other, "new": plain, "newer": other}


def test_freeze_makes_settings_hashable_at_every_depth():
    frozen = freeze({"a": [1, {"b": [2, 3]}]})
    assert frozen == {"a": (1, {"b": (2, 3)})} and hash(frozen) == hash(freeze({"a": (1, {"b": (2, 3)})}))


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The command line, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    return call


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a package that adds names by entry points; every table looks for them again."""
    forget = [getattr(Registries(), kind) for kind in KINDS]

    def go(points: str, source: str) -> None:
        (tmp_path / "site" / "thing_pack-1.0.dist-info").mkdir(parents=True)
        (tmp_path / "site" / "thing_pack.py").write_text(source)
        info = tmp_path / "site" / "thing_pack-1.0.dist-info"
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thing-pack\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(points)
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        importlib.invalidate_caches()
        for table in forget:
            table.__dict__.pop("_installed", None)

    yield go
    sys.modules.pop("thing_pack", None)
    for table in forget:
        table.__dict__.pop("_installed", None)
        table._loaded.clear()


POINTS = """
[fedloom.metrics]
half = thing_pack:half
broken = thing_pack:missing
[fedloom.partitions]
gone = no_such_module:gone
"""
SOURCE = '''
def half(logits, labels):
    """One half."""
    return 0.5
'''
RECIPE = """
rounds = 1
data = { dataset = "digits", devices = 2, max_examples = 20, test_examples = 20 }
model = { family = "convnet", hidden = [2, 2] }
tiers = [{ name = "all", share = 1.0 }]
method = { name = "fedavg" }
evaluation = { metrics = ["half"] }
"""


def test_entry_points_of_an_installed_package_are_names(install, command, tmp_path):
    assert "half" not in fl.metrics
    install(POINTS, SOURCE)
    assert "thing_pack" not in sys.modules
    assert "half" in fl.metrics and "thing_pack" not in sys.modules  # loaded when used
    assert fl.metrics.half.summary == "One half." and fl.metrics.source("half") == "thing-pack"
    (tmp_path / "recipe.toml").write_text(RECIPE)
    run = fl.run("recipe.toml", out="run", progress=False)
    assert {row.value for row in run.rows() if row.metric == "half"} == {0.5}
    assert run.manifest["own_names"] == {"metrics": ["half"]}


def test_broken_entry_points_fail_only_where_they_are_used(install, command, tmp_path):
    install(POINTS, SOURCE)
    assert "broken" in fl.metrics
    with pytest.raises(
        EntryPointError, match=r"metrics\.broken of the package thing-pack cannot be imported"
    ) as caught:
        fl.metrics["broken"]
    assert "thing_pack:missing" in caught.value.hint
    assert find_name(fl.metrics, "no entry") is None and find_name(fl.partitions, fl.partitions["iid"]) == "iid"
    (tmp_path / "recipe.toml").write_text(RECIPE)
    fl.check("recipe.toml")
    for kind in ("metrics", "partitions"):
        assert command("list", kind).code == 0
    listed = {one["name"]: one for one in command("list", "partitions", "--format", "json").data}
    assert "cannot be imported: ModuleNotFoundError" in listed["gone"]["summary"]
    used = command("check", "recipe.toml", "--set", "data.partition.kind=gone")
    assert used.code == 4 and "partitions.gone of the package thing-pack cannot be imported" in used.err
    shown = command("list", "metrics", "broken")
    assert shown.code == 4 and "cannot be imported" in shown.err


def test_file_that_only_registers_adds_names_to_the_process(command, tmp_path, monkeypatch):
    for table in (fl.metrics, fl.optimizers):
        monkeypatch.setattr(table, "_entries", dict(table._entries))
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("half", "third"))
    (tmp_path / "mine.py").write_text(
        "import fedloom as fl\n@fl.metrics.register('third')\ndef third(logits, labels):\n    return 1 / 3\n"
    )
    assert command("check", "recipe.toml").code == 4
    assert command("check", "recipe.toml", "--with", "mine.py").code == 0
    assert "third" in fl.metrics
    (tmp_path / "empty.py").write_text("import fedloom\n")
    refused = command("check", "recipe.toml", "--with", "empty.py")
    assert refused.code == 4 and "WITH_EMPTY" in refused.err


ALL_KINDS = """
import fedloom as fl
from fedloom.data import Preparation

def own(*passed, **settings):
    '''Is one of {kind}.'''

{table} = {{"homemade": {entry}}}
"""
ENTRIES = {
    "methods": "fl.methods.FedAvg",
    "preparations": "Preparation()",
    "export_formats": "fl.export_formats['safetensors']",
}


@pytest.mark.parametrize("kind", KINDS)
def test_table_of_a_file_adds_names_of_every_kind(kind, command, tmp_path):
    source = ALL_KINDS.format(kind=kind, table=kind.upper(), entry=ENTRIES.get(kind, "own"))
    (tmp_path / "mine.py").write_text(source)
    listed = command("list", kind, "homemade", "--with", "mine.py", "--format", "json")
    assert listed.code == 0 and listed.data["name"] == "homemade"
    assert command("list", kind, "--with", "mine.py").out.splitlines()[-1].strip()
    assert "homemade" not in getattr(Registries(), kind)
    if kind not in ENTRIES:
        assert listed.data["summary"] == f"Is one of {kind}."


@pytest.mark.parametrize("content", ["METRICS = 3", "METRICS = [1]", "OPTIMIZERS = {'x': 3}", "METHODS = {3: 4}"])
def test_table_of_the_wrong_form_is_refused(content, command, tmp_path):
    (tmp_path / "mine.py").write_text(content)
    refused = command("list", "metrics", "--with", "mine.py", "--format", "json")
    assert refused.code == 4 and json.loads(refused.out)["error_code"] == "WITH_FORM"
    assert not Path("runs").exists()


def test_registries_refuse_an_unknown_kind():
    with pytest.raises(TypeError, match="there is no kind 'metric' of names; there are: methods"):
        Registries().with_names(metric={"x": other})
