"""What the verbs return: the same as the command line writes, and shown well in a notebook."""

import json
import logging
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas
import pytest

import fedloom as fl
from fedloom import results
from fedloom.results import Result, format_cell, html_table, line_chart, text_table, to_plain
from tests.api.conftest import results_of

RECIPE = """
rounds = 2
data = { dataset = "digits", devices = 4, max_examples = 40, test_examples = 40 }
model = { family = "convnet", hidden = [2, 4] }
tiers = [{ name = "large", share = 0.5 }, { name = "small", share = 0.5, width = 0.5 }]
training = { batch_size = 40 }
method = { name = "heterofl" }
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the recipe and a finished run of it."""
    folder = tmp_path_factory.mktemp("results")
    (folder / "recipe.toml").write_text(RECIPE)
    fl.run(folder / "recipe.toml", out=folder / "run", progress=False)
    return folder


@pytest.fixture
def at_home(home, fedloom, monkeypatch):
    monkeypatch.chdir(home)
    return fedloom


def check_shown(result: Result) -> None:
    """A result can be read in a terminal, a notebook, a program and a data frame."""
    text, page = repr(result), result._repr_html_()
    assert 0 < len(text) < 4000 and " at 0x" not in text and not text.startswith(f"{type(result).__name__}(")
    ElementTree.fromstring(f"<body>{page}</body>")  # well-formed
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False)) == result.to_dict()
    frame = result.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    if not isinstance(result, fl.Run):
        assert len(frame) == len(result.records())


def same_but_for(data, result, *keys):
    """Compared without what depends on the machine or the folder."""
    assert {k: v for k, v in data.items() if k not in keys} == {
        k: v for k, v in result.to_dict().items() if k in data and k not in keys
    }


def test_run_is_what_the_command_runs(at_home, tmp_path):
    data = at_home("run", "recipe.toml", "--out", str(tmp_path / "command"), "--format", "json", "--no-report").data
    run = fl.run("recipe.toml", out=tmp_path / "function", progress=False)
    same_but_for(data, run, "run")
    assert results_of(run) == results_of(fl.open_run(tmp_path / "command"))
    check_shown(run)
    assert len(run.to_frame()) == len(run.rows()) and "<svg" in run._repr_html_()


def test_round_result_is_shown(at_home):
    (first, *_) = fl.Simulation.from_recipe("recipe.toml").rounds(1)
    check_shown(first)
    assert first.to_dict()["metrics"] == to_plain(first.metrics) and "round 1 of 1: 4 of 4 replies" in repr(first)


def test_compare_is_what_the_command_compares(at_home, tmp_path):
    options = ["--methods", "fedrolex", "--seeds", "2", "--set", "rounds=1"]
    data = at_home(
        "compare", "recipe.toml", *options, "--out", str(tmp_path / "a"), "--format", "json", "--no-report"
    ).data
    compared = fl.compare(
        "recipe.toml", methods=["fedrolex"], seeds=2, sets=["rounds=1"], out=tmp_path / "b", progress=False
    )
    same_but_for(data, compared, "run")
    check_shown(compared)
    assert [run.manifest["seed"] for run in compared.runs("fedrolex")] == [0, 1]
    assert fl.report(compared) == tmp_path / "b" / "report.html"


def test_compare_of_simulations_takes_the_names_of_all(make, tmp_path):
    def net(units):
        from torch import nn

        def build(input_shape, classes):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, units), nn.Linear(units, classes))

        return build

    first, second = (make(tiers=fl.tiers(net(units), all={"share": 1.0}), rounds=1) for units in (2, 3))
    with pytest.raises(ValueError, match=r"models\.build is something else in another simulation"):
        fl.compare(first, second, out="refused", progress=False)
    own = make(tiers=fl.tiers(net(3), all={"share": 1.0}), rounds=1, method=fl.methods.FedAvg())
    compared = fl.compare(
        make(tiers=fl.tiers(fl.models.convnet, {"hidden": (2, 4)}, all={"share": 1.0}), rounds=1),
        own,
        out="both",
        progress=False,
    )
    assert [record["arm"] for record in compared.to_dict()["arms"]] == ["heterofl", "fedavg-2"]
    assert compared.runs("fedavg-2")[0].model().net[1].weight.shape == (3, 64)


def test_compare_of_simulations_on_the_same_arrays_runs(make):
    x, y = np.random.default_rng(0).normal(size=(60, 1, 8, 8)).astype(np.float32), np.arange(60) % 3
    sims = [make(dataset=(x, y), data=None, rounds=1, method=method) for method in ("heterofl", "fedrolex")]
    compared = fl.compare(*sims, out="both", progress=False)
    assert [record["arm"] for record in compared.to_dict()["arms"]] == ["heterofl", "fedrolex-2"]
    other = make(dataset=(x + 1, y), data=None, rounds=1, method="fedrolex")
    with pytest.raises(ValueError, match=r"datasets\.data is something else in another simulation"):
        fl.compare(sims[0], other, out="refused", progress=False)


def test_open_run_of_no_run_is_refused_at_once(at_home, tmp_path):
    with pytest.raises(fl.RecipeError, match="this is not the folder of a run"):
        fl.open_run(tmp_path)
    assert fl.open_run("run").final


def test_plan_is_what_the_command_plans(at_home):
    planned = fl.plan("recipe.toml")
    assert planned.to_dict() == at_home("plan", "recipe.toml", "--format", "json").data
    check_shown(planned)


def test_check_raises_what_the_command_reports(at_home):
    assert fl.check("recipe.toml") is None and at_home("check", "recipe.toml").code == 0
    reported = at_home("check", "recipe.toml", "--set", "training.epochs=0", "--format", "json")
    with pytest.raises(fl.RecipeError) as caught:
        fl.check("recipe.toml", sets=["training.epochs=0"])
    assert reported.code == 4 and caught.value.issues[0].code in reported.out


def test_attack_is_what_the_command_attacks(at_home):
    options = ["--attacks", "sign_flip", "--rules", "median", "--share", "0.25", "--set", "rounds=1"]
    data = at_home("attack", "recipe.toml", *options, "--format", "json").data
    attacked = fl.attack(
        "recipe.toml", attacks=["sign_flip"], rules=["median"], share=0.25, sets=["rounds=1"], progress=False
    )
    assert attacked.to_dict() == data
    check_shown(attacked)


def test_subnet_is_what_the_command_cuts(at_home):
    data = at_home("subnet", "run", "--count", "3", "--examples", "20", "--format", "json").data
    found = fl.subnet("run", count=3, examples=20)
    same_but_for(data, found, "measured")
    check_shown(found)
    with pytest.raises(TypeError, match="use one of macs, params and latency"):
        fl.subnet("run", macs=1, params=1)


def test_verify_audit_and_cka_are_what_the_commands_find(at_home):
    verdict = fl.verify("run")
    assert at_home("verify", "run", "--format", "json").data == {"run": "run", **verdict.to_dict()}
    audit = fl.audit("run")
    assert at_home("audit", "run", "--format", "json").data == audit.to_dict()
    cka = fl.cka("run", "run", examples=10)
    assert at_home("cka", "run", "run", "--examples", "10", "--format", "json").data == cka.to_dict()
    for result in (verdict, audit, cka):
        check_shown(result)
    assert repr(verdict) == f"{verdict.replayed}: the same to the bit"


def test_export_is_what_the_command_exports(at_home, tmp_path):
    data = at_home("export", "run", "--to", "safetensors", "--out", str(tmp_path / "a"), "--format", "json").data
    exported = fl.export("run", "safetensors", out=tmp_path / "b")
    same_but_for(data, exported, "folder", "latency")
    check_shown(exported)
    assert fl.load_model(tmp_path / "b") is not None


def test_resume_is_what_the_command_resumes(at_home, make):
    sims = [make() for _ in range(2)]
    for name, sim in zip(("command", "function"), sims, strict=True):
        next(sim.rounds())
        sim._stop("")
        sim.folder.rename(name)
    data = at_home("resume", str(Path("command").absolute()), "--format", "json", "--no-report").data
    run = fl.resume("function", progress=False)
    assert (data["since"], data["final"]) == (run.resumed_after, run.to_dict()["final"]) and run.resumed_after == 1


def test_reproduce_row_and_claims_are_shown():
    from fedloom.api.reproduce import ClaimsResult, RowResult

    numbers = ({"what": "accuracy, large", "published": 90.0, "measured": 89.5},)
    check_shown(RowResult("row", "Table 1 of <a paper>", Path("runs/row"), ("rounds=2",), numbers))
    claim = {
        "claim": "c",
        "verdict": "agrees",
        "published": "a > b",
        "measured": {"agreeing_seeds": 4},
        "seeds": [0, 1, 2, 3, 4],
    }
    check_shown(ClaimsResult((claim,), {"r.toml": "no data"}))
    assert repr(ClaimsResult()) == "every claim has been decided"


LEDGER = """
paper = "Own"
levels = { large = 1.0 }

[choices]
short = ["rounds=1"]

[[tables]]
name = "own_table1"
source = "Table 1"
recipe = "my.toml"
numbers = [{ tier = "large" }]
rows = { "short" = [90.5] }
"""


def test_reproduce_is_what_the_command_reproduces(fedloom, tmp_path):
    (tmp_path / "own" / "ledger").mkdir(parents=True)
    (tmp_path / "own" / "ledger" / "own.toml").write_text(LEDGER)
    (tmp_path / "own" / "my.toml").write_text(RECIPE)
    data = fedloom(
        "reproduce", "own_table1_short", "--recipes", "own", "--runs", "a", "--quiet", "--format", "json"
    ).data
    row = fl.reproduce("own_table1_short", recipes="own", runs="b", progress=False)
    same_but_for(data, row, "run")
    check_shown(row)
    with pytest.raises(fl.RecipeError, match="there is no row 'own_table1_shrt'"):
        fl.reproduce("own_table1_shrt", recipes="own")
    with pytest.raises(fl.RecipeError, match="name a row, or a claim, or ask for everything"):
        fl.reproduce()


def test_progress_true_false_function_and_default(at_home, tmp_path, capfd, caplog):
    heard = []
    fl.run("recipe.toml", out=tmp_path / "heard", progress=lambda name, result: heard.append((name, result.number)))
    assert heard == [("heterofl", 1), ("heterofl", 2)] and capfd.readouterr() == ("", "")
    fl.run("recipe.toml", out=tmp_path / "shown", progress=True)
    shown = capfd.readouterr()
    assert shown.out == "" and "round 2/2" in shown.err
    with caplog.at_level(logging.INFO, "fedloom"):
        fl.run("recipe.toml", out=tmp_path / "silent", progress=False)
        assert not any("round" in message for message in caplog.messages)
        fl.run("recipe.toml", out=tmp_path / "logged")
    assert any("round 2/2" in message for message in caplog.messages)
    assert capfd.readouterr() == ("", "")


def test_to_frame_without_pandas_says_what_to_install(at_home, monkeypatch):
    def refuse(name):
        raise ImportError(name)

    monkeypatch.setattr(results, "import_module", refuse)
    with pytest.raises(ImportError, match="to_frame needs pandas: pip install pandas; to_dict and records do without"):
        fl.open_run("run").to_frame()


class Nasty(Result):
    """Names and values that must be escaped, and numbers that JSON does not have."""

    @property
    def title(self):
        return "<script>&"

    def records(self):
        return [{"<b>": "</td>", "number": float("nan"), "count": 1234567, "ok": True}, {"<b>": None, "big": 1e9}] * 15


def test_results_are_escaped_and_cut_short():
    page = Nasty()._repr_html_()
    ElementTree.fromstring(f"<body>{page}</body>")
    assert "<script>" not in page and "&lt;script&gt;&amp;" in page and "… 10 more rows" in page
    assert "… 10 more rows" in repr(Nasty())
    check_shown(Nasty())
    assert Nasty().to_dict()["records"][0] == {"<b>": "</td>", "number": None, "count": 1234567, "ok": True}


def test_cells_and_empty_tables():
    values = [None, float("nan"), True, 1234.5, 3e9, 7, "text", float("inf")]
    assert [format_cell(value) for value in values] == ["–", "–", "yes", "1,234.50", "3e+09", "7", "text", "inf"]
    assert (text_table([]), html_table([])) == ("(nothing)", "")


def test_line_chart_is_well_formed_and_needs_two_points():
    chart = line_chart({"<a>": [(1, 1.0), (2, 3.0), (3, float("nan"))], "b": [(1, 2.0), (2, 2.0)]}, "accuracy & more")
    root = ElementTree.fromstring(chart)
    assert len([one for one in root if one.tag.endswith("polyline")]) == 2
    assert line_chart({"a": [(1, 1.0)]}) == ""
