"""What the command line says: the test that a method is for comes first, and help texts are complete."""

import json
import re
from pathlib import Path

import pytest
import typer

import fedloom as fl
from fedloom.cli.app import app
from fedloom.reporting.page import build_page
from fedloom.reporting.report_data import read_report_data
from fedloom.reporting.summary import write_sentences


@pytest.fixture(scope="module")
def personal(fedloom_in):
    """A run of a method with personal models, whose devices have few labels."""
    call, write, folder = fedloom_in
    write(
        ("rounds = 2", "rounds = 1"),
        ('name = "heterofl"', 'name = "standalone"'),
        ("devices = 4", 'devices = 4\npartition = { kind = "dirichlet", alpha = 0.3 }'),
    )
    return call("run", "my.toml", "--out", "own"), folder / "own"


def test_run_of_personal_models_shows_their_own_tests_first(personal):
    result, _ = personal
    assert re.search(r"standalone  round 1/1  local test: large +[\d.]+ %  small +[\d.]+ %  4/4 replies", result.err)
    header, *rows = [line.split() for line in result.out.partition("\n\n")[0].splitlines()]
    tests = [row[header.index("test") + 1] for row in rows]  # the model has two words
    assert tests == ["local", "local", "global", "global"]


def test_handle_and_report_of_personal_models_show_their_own_tests_first(personal):
    _, folder = personal
    run = fl.open_run(folder)
    assert run.headline_test == "local"
    assert run.final[0].test == "local" and run.title.endswith("headline: local test")
    assert "accuracy on the local test" in run.picture() or not run.picture()
    data = read_report_data([folder])
    assert data.test == "local"
    first, judged, *rest = write_sentences(data)
    assert first.startswith("standalone reaches an accuracy of ")
    assert judged.startswith("Judged on the devices' own test examples")
    assert any(line.startswith("On the whole test set: ") for line in rest)
    titles = re.findall(r'<h2[^>]* id="[\w-]+-title">(.*?)</h2>', build_page(data).html)
    assert titles[:2] == [
        "Accuracy on the devices&#39; own test examples, by round", "Accuracy on the whole test set, by round",
    ]  # fmt: skip


def test_tracker_of_personal_models_gets_their_own_tests_first(fedloom, write, tmp_path):
    write(("rounds = 2", "rounds = 1"), ('name = "heterofl"', 'name = "standalone"'))
    assert fedloom("run", "my.toml", "--track", "csv", "--out", "run").code == 0
    _, first, *_ = (tmp_path / "run/rows.csv").read_text().splitlines()[0].split(",")
    assert first.endswith("/local/accuracy")


def test_card_of_personal_model_has_its_own_test_first(personal):
    _, folder = personal
    card = fl.open_run(folder).export("safetensors", device="0").card
    assert list(card["evaluated"]["tests"]) == ["local", "global"]
    assert next(iter(card["measured"])) == "local"


def test_verify_and_card_of_one_round_have_the_singular(personal, fedloom_in):
    _, folder = personal
    call, *_ = fedloom_in
    assert call("verify", "own").out == "1 round after round 0 replayed: the same to the bit\n"
    card = fl.open_run(folder).export("safetensors", device="1").folder / "card.md"
    assert "for 1 round on 4 devices, seed 0" in card.read_text("utf-8")


def test_compare_of_global_and_personal_methods_says_which_test_decides(fedloom, write):
    write(("rounds = 2", "rounds = 1"))
    result = fedloom("compare", "my.toml", "--controls", "standalone", "--out", "one", "--format", "json").data
    line = "judged on the global test, which every arm has; standalone is made for the local test, shown beside it"
    assert result["test"] == "global" and line in result["verdict"]
    assert all(arm["local_test"] and not arm["global_test"] for arm in result["arms"])
    write(("rounds = 2", "rounds = 1"), ('name = "heterofl"', 'name = "standalone"'))
    result = fedloom("compare", "my.toml", "--methods", "fjord", "--out", "two", "--format", "json").data
    line = "judged on the local test, which every arm has; fjord is made for the global test, shown beside it"
    assert result["test"] == "local" and line in result["verdict"]
    assert all(arm["global_test"] and not arm["local_test"] for arm in result["arms"])
    terms = json.loads(Path("two/comparison.json").read_text())["terms"]
    assert (terms["test"], terms["headlines"]) == ("local", {"standalone": "local", "fjord": "global"})
    assert line in write_sentences(read_report_data([Path("two")]))


def commands(command, path=()):
    """Every command and its path, those of groups included."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


def test_help_of_every_verb_shows_its_brackets(fedloom, monkeypatch):
    """Help is written as markup, in which [extra] would vanish. What the source says must be what is shown."""
    monkeypatch.setenv("COLUMNS", "200")
    found = list(commands(typer.main.get_command(app)))
    assert len(found) > 20
    for path, command in found:
        shown = re.sub(r"[\s│]+", " ", fedloom(*path, "--help").out)
        for help_text in filter(None, [command.help, *(getattr(one, "help", None) for one in command.params)]):
            for bracket in re.findall(r"\[[^\]]*\]", help_text):
                assert bracket.replace("\\", "") in shown, f"{path}: {bracket} is missing"
            assert not re.search(r"Needs fedloom\.", shown)


def test_unknown_verb_is_suggested_once(fedloom):
    result = fedloom("runn")
    assert result.code == 4
    assert result.err.count("Did you mean 'run'?") == 1


def test_plan_explains_its_columns(fedloom, write):
    write()
    text = " ".join(fedloom("plan", "my.toml").out.split())
    assert "published FLOPs" in text
    assert "Published FLOPs: the same as tables of papers after HeteroFL count it" in text
    assert "MACs: multiply-adds of one example" in text


def test_tables_and_sentences_fit_the_terminal(fedloom, write, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    write(("rounds = 2", "rounds = 1"))
    for command in ("compare my.toml --seeds 2 --out out", "plan my.toml", "check my.toml", "list methods"):
        out = fedloom(*command.split()).out
        assert max(map(len, out.splitlines())) <= 80, command
    assert fedloom("plan", "my.toml").out.count("tier ") >= 1
