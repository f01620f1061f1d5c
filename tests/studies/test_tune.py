"""A search keeps every trial, never sees the test set, and goes on to the same choice after it was killed."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedloom as fl
from fedloom.methods import METHODS
from fedloom.recipe.errors import RecipeError
from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries
from fedloom.recipe.search_space import build_space, declared_domains, declared_space, parse_searched
from fedloom.registry import settable_parameters
from fedloom.reporting.search import is_search
from fedloom.runs.data import read_data
from fedloom.runs.folder import read_manifest
from fedloom.settings import SearchChoices, SearchRange
from fedloom.studies.tune import (
    SearchFailed,
    SearchTerms,
    count_stages,
    plan_search,
    reopen_search,
    stage_rounds,
    survivors,
)
from tests.chaos import forked, recipe

NAMES = Registries()
SEARCHED = ("training.optimizer.lr", "training.lr_schedule")
TRIALS = 10  # two waves


def searched_recipe() -> dict[str, Any]:
    document = recipe("heterofl", rounds=4)
    return {**document, "data": {**document["data"], "validation": 60, "test_examples": 60}}


def run_search(home: Path, trials: int = TRIALS, steps: int = 10**9) -> None:
    """Run a search in a new folder, or go on with one, and stop it after some steps."""
    if is_search(home):
        search = reopen_search(home, NAMES, home, 1)
    else:
        arms = {name: load({**searched_recipe(), "method": {"name": name}}, NAMES) for name in ("heterofl", "fedrolex")}
        search = plan_search(arms, NAMES, home, home, SearchTerms(trials), SEARCHED)
    results = search.rounds()
    for _ in zip(range(steps), results, strict=False):
        pass
    results.close()  # type: ignore[attr-defined]


def read_choice(home: Path, arm: str = "heterofl") -> tuple[dict[str, Any], dict[str, Any]]:
    chosen = tomllib.loads((home / arm / "chosen.toml").read_text("utf-8"))
    return json.loads((home / arm / "search.json").read_text("utf-8")), chosen


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("search") / "home"
    run_search(home)
    return home


@pytest.mark.parametrize("steps", [3, 20, 27])
def test_search_stopped_and_reopened_makes_the_same_choice(tmp_path: Path, complete: Path, steps: int) -> None:
    run_search(tmp_path / "home", steps=steps)
    assert read_manifest(tmp_path / "home")["status"] == "running"
    run_search(tmp_path / "home")
    for arm in ("heterofl", "fedrolex"):
        assert read_choice(tmp_path / "home", arm) == read_choice(complete, arm)


def test_search_killed_and_reopened_makes_the_same_choice(tmp_path: Path, complete: Path) -> None:
    home, killed_after = tmp_path / "home", 0.3
    while not forked(lambda: run_search(home), killed_after):
        killed_after *= 1.7
    assert read_choice(home) == read_choice(complete)


def test_search_score_lost_between_stages_is_measured_again(tmp_path: Path, complete: Path) -> None:
    home = tmp_path / "home"
    run_search(home, steps=9)
    file = home / "heterofl" / "search.json"
    known = json.loads(file.read_text())
    known["tried"][2]["scores"] = {}
    file.write_text(json.dumps(known))
    run_search(home)
    assert read_choice(home) == read_choice(complete)


def test_search_reopened_with_other_proposals_is_refused(tmp_path: Path) -> None:
    run_search(tmp_path / "home", trials=3, steps=2)
    file = tmp_path / "home" / "heterofl" / "search.json"
    known = json.loads(file.read_text())
    known["tried"][1]["settings"]["training.optimizer.lr"] = 0.5
    file.write_text(json.dumps(known))
    with pytest.raises(RecipeError, match="SEARCH_CHANGED"):
        run_search(tmp_path / "home")


def test_search_gives_every_arm_the_same_budget_and_keeps_every_trial(complete: Path) -> None:
    records = [read_choice(complete, arm)[0] for arm in ("heterofl", "fedrolex")]
    rounds = [sorted(max(map(int, one["scores"])) for one in record["tried"]) for record in records]
    assert rounds[0] == rounds[1]
    assert len(rounds[0]) == TRIALS and 4 in rounds[0] and 1 in rounds[0]
    assert records[0]["bytes"] == pytest.approx(records[1]["bytes"], rel=0.2)  # rolling slices have other sizes
    for record in records:
        folders = {path.parent.parent.name for path in (complete / record["arm"]).glob("trial-*/seed-0/rows.jsonl")}
        assert folders == {f"trial-{number:03d}" for number in range(TRIALS)}


def test_search_first_trial_is_the_recipe_and_choice_is_the_best_of_all_rounds(complete: Path) -> None:
    record, chosen = read_choice(complete)
    assert record["tried"][0]["settings"]["training.optimizer.lr"] == 0.1
    full = {one["number"]: one["scores"]["4"]["0"] for one in record["tried"] if "4" in one["scores"]}
    assert record["choice"]["score"] == max(full.values()) == full[record["choice"]["trial"]]
    assert chosen["training"]["optimizer"]["lr"] == record["choice"]["settings"]["training.optimizer.lr"]
    assert "validation" not in chosen["data"]


def test_chosen_trial_run_alone_has_the_same_bits(tmp_path: Path, complete: Path) -> None:
    record, _ = read_choice(complete)
    trial = complete / "heterofl" / f"trial-{record['choice']['trial']:03d}" / "seed-0"
    alone = fl.run(trial / "recipe.toml", out=tmp_path / "alone", data_dir=tmp_path, progress=False)
    assert alone.manifest["sha256"] == read_manifest(trial)["sha256"]


def test_search_trials_hold_validation_examples_in_place_of_the_test_set(complete: Path) -> None:
    whole = read_data(load(recipe("heterofl", rounds=4), NAMES), NAMES, complete)
    split = read_data(load(searched_recipe(), NAMES), NAMES, complete)
    training = {example.numpy().tobytes() for example in whole.train.x}
    assert len(split.test) == 60 and all(example.numpy().tobytes() in training for example in split.test.x)
    assert len(split.train) == len(whole.train) - 60
    manifests = [read_manifest(path.parent) for path in complete.glob("*/trial-*/seed-0/rows.jsonl")]
    assert len(manifests) == 2 * TRIALS
    assert {one["data"] for one in manifests} == {split.fingerprint()}  # of all examples that a trial has


def test_search_in_which_every_trial_fails_is_an_error(tmp_path: Path) -> None:
    arms = {"heterofl": load(searched_recipe(), NAMES, ["training.optimizer.lr=1e30"])}
    search = plan_search(
        arms, NAMES, tmp_path / "home", tmp_path, SearchTerms(2), ["training.optimizer.lr=1e30..1e31:log"]
    )
    list(search.rounds())
    with pytest.raises(SearchFailed, match="every trial of heterofl"):
        search.chosen_recipes()


def test_search_without_optuna_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(RecipeError, match=r"fedloom\[tune\]"):
        run_search(tmp_path / "home")


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 100))
def test_stages_shrink_to_all_rounds(trials: int, halving: int, total: int) -> None:
    stages = count_stages(trials, halving)
    ends = stage_rounds(total, stages, halving)
    counts = [survivors(trials, stage, halving) for stage in range(stages)]
    assert 1 <= stages <= 3 and ends[-1] == total and counts[0] == trials
    assert ends == sorted(ends) and ends[0] >= 1
    assert counts == sorted(counts, reverse=True) and counts[-1] >= 1


# ---- what is searched


@pytest.mark.parametrize(
    ("text", "domain"),
    [
        ("training.optimizer.lr=0.01..1:log", SearchRange(0.01, 1, log=True)),
        ("training.epochs = 1..4", SearchRange(1, 4)),
        ("training.epochs=1,2,4", SearchChoices((1, 2, 4))),
        ("method.weighting=uniform,examples", SearchChoices(("uniform", "examples"))),
        ("training.optimizer.lr", None),
        ("training.optimizer.lr=1e-3..1e-1", SearchRange(0.001, 0.1)),
    ],
)
def test_parse_searched_reads_ranges_and_values(text: str, domain: Any) -> None:
    found = parse_searched(text)
    assert found.key == text.partition("=")[0].strip() and found.domain == domain


@pytest.mark.parametrize("text", ["a=1..b", "a=2..1", "a=0..1:log", "a=1..2:lin", "a=true..2"])
def test_parse_searched_refuses_what_is_no_range(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_searched(text)


def test_declared_ranges_of_methods_hold_their_defaults() -> None:
    declared = {name: declared_domains(METHODS[name]) for name in METHODS.built_in}
    with_strengths = {"scaffold", "feddyn", "depthfl", "scalefl", "fd", "fedproto", "fedtgp", "fedgh", "fml"}
    assert with_strengths <= {name for name, domains in declared.items() if domains}
    for name, domains in declared.items():
        for key, domain in domains.items():
            default = settable_parameters(METHODS[name])[key].default
            if isinstance(domain, SearchRange) and default is not None:
                assert domain.low <= default <= domain.high, (name, key)


def test_declared_space_has_optimizer_schedule_and_strengths() -> None:
    document = {**recipe("heterofl", rounds=4), "method": {"name": "fedprox"}}
    space = declared_space(load(document, NAMES), NAMES)
    assert {"training.optimizer.lr", "training.epochs", "training.lr_schedule", "method.proximal"} <= set(space)
    assert SearchChoices(({"kind": "constant"}, {"kind": "cosine", "rounds": 4})) == space["training.lr_schedule"]


@pytest.mark.parametrize("name", sorted(fl.methods.METHODS.built_in))
def test_declared_ends_are_valid_settings(name: str) -> None:
    settings = {"parts": ()} if name == "mixed" else {}
    loaded = load({**recipe("heterofl", rounds=4), "method": {"name": name, **settings}}, NAMES)
    space = declared_space(loaded, NAMES)
    assert build_space({name: loaded}, NAMES, list(space)) == {name: space}


@pytest.mark.parametrize(
    ("searched", "code"),
    [
        ("training.optimizer.rate=1..2", "SEARCH_KEY"),
        ("training.optimizer.lr=-1..2", "SEARCH_KEY"),
        ("training.batch_size", "SEARCH_KEY"),
        ("data.devices=2,3", "SEARCH_KEY"),
        ("training.optimizer.lr=2..1", "SEARCH_FORM"),
    ],
)
def test_build_space_refuses_what_cannot_be_searched(searched: str, code: str) -> None:
    with pytest.raises(RecipeError) as caught:
        build_space({"heterofl": load(recipe("heterofl", rounds=4), NAMES)}, NAMES, [searched])
    assert [issue.code for issue in caught.value.issues] == [code]


# ---- the verbs


def test_tune_verb_and_compare_with_tune_choose_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, document: Callable[..., dict[str, Any]]
) -> None:
    """Compare tests once, with the settings that tune chooses, to the bit; resumed, it does not search again."""
    monkeypatch.chdir(tmp_path)
    small = document(tune={"search": ["training.optimizer.lr=0.05..2:log"], "halving": 2}, data__max_examples=20)
    compared = fl.compare(small, controls=["standalone"], tune=3, out="both", progress=False)
    found = fl.tune(small, trials=3, controls=["standalone"], out="search", progress=False)
    assert set(found.chosen) == {"heterofl", "standalone"}
    assert [one["choice"] for one in compared.to_dict()["searches"]] == [one["choice"] for one in found.searches]
    for arm, path in found.chosen.items():
        alone = fl.run(path, out=f"alone-{arm}", progress=False)
        assert alone.manifest["sha256"] == compared.runs(arm)[0].manifest["sha256"]
    assert len(found.records()) == 6 and found.to_dict()["arms"][0]["chosen_recipe"].endswith("chosen.toml")
    again = fl.resume("both", progress=False)
    assert again.to_dict() == compared.to_dict()


def test_compare_with_tune_interrupted_in_search_is_resumed_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, document: Callable[..., dict[str, Any]]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = document(tune={"search": ["training.optimizer.lr=0.05..2:log"]}, data__max_examples=20)
    options = {"controls": ["small-for-all"], "tune": 2}
    whole = fl.compare(small, out="whole", progress=False, **options)

    def interrupt(name: str, result: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fl.compare(small, out="broken", progress=interrupt, **options)
    resumed = fl.resume("broken", progress=False).to_dict()
    assert {**resumed, "run": ""} == {**whole.to_dict(), "run": ""}
