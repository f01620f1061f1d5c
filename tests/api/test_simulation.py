"""Simulations composed in Python: one result however they are run, stopped, continued, saved or written as a recipe."""

import gc
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedloom as fl
from tests.api.conftest import fingerprints, results_of, tiny

FEDHENN = {"strength": 0.5, "growth": "none", "probe_size": 6}
ONE_TIER = fl.tiers(fl.models.convnet, {"hidden": (2, 4)}, all={"share": 1.0})
TWO_TIERS = fl.tiers(fl.models.convnet, {"hidden": (2, 4)}, large={"share": 0.5}, small={"share": 0.5, "width": 0.5})


def my_metric(logits: Any, labels: Any) -> float:
    return float((logits.argmax(-1) == labels).double().mean())


@pytest.mark.slow
def test_design_snippet_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sim = fl.Simulation(
        dataset=fl.datasets.digits(),
        partition=fl.partitions.dirichlet(devices=20, alpha=0.3),
        tiers=fl.tiers(fl.models.convnet, large=dict(share=0.3), small=dict(share=0.7, width=0.25)),  # noqa: C408
        method=fl.methods.HeteroFL(),
        client=fl.ClientConfig(epochs=1, batch_size=10, optimizer=fl.optimizers.sgd(lr=0.1)),
        seed=0,
    )
    seen = []
    for result in sim.rounds(1, metrics=["accuracy", my_metric]):
        seen.append((result.number, result.metrics))
    ((number, metrics),) = seen
    assert number == 1 and set(metrics) == {"large", "small"}
    assert all(values["my_metric"] == pytest.approx(values["accuracy"] / 100) for values in metrics.values())
    run = sim.save("my-run")
    logits = run.model("small")(sim._dataset.test.x[:3])
    assert logits.shape == (3, 10)
    assert run.report() == Path("my-run/report.html") and Path("my-run/report.html").is_file()
    assert run.export("safetensors", tier="small").file.is_file()
    sim.to_recipe("recipe.toml")
    assert len(fl.plan("recipe.toml", registries=sim.registries).tiers) == 2
    fl.check("recipe.toml", registries=sim.registries)


def test_rounds_recipe_verbs_and_command_line_have_one_result(make, fedloom):
    sim = make()
    assert [result.number for result in sim.rounds()] == [1, 2, 3]
    expected = results_of(sim.save("whole"))
    pieces = make()
    assert [result.number for result in [*pieces.rounds(2), *pieces.rounds(1)]] == [1, 2, 3]
    assert results_of(pieces.save("pieces")) == expected
    sim.to_recipe("recipe.toml")
    for number, recipe in enumerate(("recipe.toml", sim.to_recipe())):
        same = fl.Simulation.from_recipe(recipe)
        list(same.rounds())
        assert results_of(same.save(f"from-recipe-{number}")) == expected
    assert results_of(fl.run(make(), out="by-run", progress=False)) == expected
    assert fedloom("run", "recipe.toml", "--out", "by-command", "--quiet").code == 0
    by_command = fl.open_run("by-command")
    assert results_of(by_command) == expected
    files = ("recipe.toml", "fleet.json", "partition.json", "cka.json")
    written = [[(Path(run) / name).read_text() for name in files] for run in ("whole", "pieces", "by-command")]
    assert written[0] == written[1] == written[2]


def test_rounds_workers_change_no_result(make):
    runs = []
    for workers in (1, 2):
        sim = make(workers=workers)
        list(sim.rounds(2))
        runs.append(results_of(sim.save(f"workers-{workers}")))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("method", ["heterofl", "fedrep", "fedhenn"])
@pytest.mark.parametrize("evaluation", [{}, {"every": 2}], ids=["every-round", "every-second"])
def test_break_after_some_rounds_equals_a_run_of_so_many(method, evaluation, make):
    """Also for methods with a last exchange, and where only a last round is evaluated by device or at all."""
    public = {"public": {"examples": 12}} if method == "fedhenn" else {}
    parts = {
        "method": {"name": method, **(FEDHENN if method == "fedhenn" else {})},
        "tiers": ONE_TIER if method == "fedrep" else TWO_TIERS,
        "evaluation": evaluation,
        "data": {"max_examples": 100, "test_examples": 60, **public},
    }
    planned = make(**parts, rounds=1)
    numbers = [result.number for result in planned.rounds()]
    assert numbers == ([1] if method == "heterofl" else [1, 2])
    expected = results_of(planned.save("planned"))
    stopped = make(**parts, rounds=9)
    for result in stopped.rounds():
        if result.number == 1:
            break
    run = stopped.save("stopped")
    assert results_of(run) == expected
    assert (run.folder / "recipe.toml").read_text() == (planned.folder / "recipe.toml").read_text()
    assert run.manifest["status"] == "finished" and not fl.verify(run).differences


@pytest.mark.parametrize("evaluation", [{}, {"every": 2}, {"per_device": "always"}, {"every": 3, "fine_tune": {}}])
def test_going_on_after_a_finished_run_equals_one_long_run(evaluation, make):
    long, short = make(evaluation=evaluation), make(evaluation=evaluation, rounds=1)
    list(long.rounds())
    list(short.rounds())
    assert short.run.manifest["status"] == "finished" and short.run.final
    assert [result.number for result in short.rounds(1)] == [2]
    short.save("short")
    assert [result.number for result in short.rounds(1)] == [3]
    assert results_of(short.run) == results_of(long.run)
    assert not fl.verify("short", rounds=2).differences


def test_going_on_after_a_last_exchange_is_refused(make):
    sim = make(method="fedrep", tiers=ONE_TIER, rounds=1)
    assert [result.number for result in sim.rounds()] == [1, 2]
    for count in (None, 2):
        with pytest.raises(ValueError, match="fedrep has ended with its last exchange and cannot go on"):
            sim.rounds(count)
    assert sim.run.manifest["status"] == "finished"


def test_rounds_after_all_have_run_says_how_to_go_on(make):
    sim = make(rounds=1)
    list(sim.rounds())
    with pytest.raises(ValueError, match=r"it has run all of its 1 round; rounds\(5\) runs five more"):
        sim.rounds()
    with pytest.raises(ValueError, match="count is at least 1, not 0"):
        sim.rounds(0)


def test_resume_of_an_interrupted_folder_finishes_to_the_same_bits(make):
    sim = make()
    list(sim.rounds())
    expected = results_of(sim.save("whole"))
    cut = make()
    for _ in cut.rounds():
        break
    (folder := Path("cut")).symlink_to(cut.folder)  # as it lies there when a process ends
    assert fl.open_run(folder).manifest["status"] == "interrupted"
    resumed = fl.Simulation.resume(folder)
    assert "1 of 3 rounds" in repr(resumed)
    assert [result.number for result in resumed.rounds()] == [2, 3]
    assert results_of(resumed.run) == expected
    assert resumed.run.folder == folder


def test_resume_of_changed_recipe_or_no_run_is_refused(make, tmp_path):
    sim = make()
    for _ in sim.rounds():
        break
    recipe = sim.folder / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("batch_size = 100", "batch_size = 50"))
    with pytest.raises(fl.RecipeError, match=r"training\.batch_size was 100, is 50"):
        fl.Simulation.resume(sim.folder).rounds()
    with pytest.raises(fl.RecipeError, match="not the folder of a run"):
        fl.Simulation.resume(tmp_path)


def test_save_moves_the_run_and_never_overwrites(make):
    sim = make(rounds=1)
    with pytest.raises(ValueError, match="no round has run yet"):
        sim.save("early")
    assert not Path("early").exists()
    list(sim.rounds())
    scratch = sim.folder
    run = sim.save("kept")
    assert run.folder == Path("kept") == sim.folder and not scratch.exists() and not scratch.parent.exists()
    with pytest.raises(fl.RecipeError, match="OUT_EXISTS"):
        sim.save("kept")
    copy = sim.save("copy")
    assert Path("kept").is_dir() and results_of(copy) == results_of(fl.open_run("kept"))


def test_unsaved_run_leaves_nothing_behind(make):
    sim = make(rounds=1)
    list(sim.rounds())
    scratch = sim.folder.parent
    assert scratch.is_dir()
    del sim
    gc.collect()
    assert not scratch.exists()


def test_save_with_a_suspended_iterator_ends_it(make):
    sim = make()
    rounds = sim.rounds()
    assert next(rounds).number == 1
    run = sim.save("saved")
    assert run.manifest["status"] == "finished" and run.to_dict()["final"]
    with pytest.raises(RuntimeError, match=r"Simulation.save has ended this loop over rounds\(\)"):
        next(rounds)
    short = make(rounds=1)
    list(short.rounds())
    assert results_of(short.run) == results_of(run)


def test_model_inside_the_loop_ends_it_with_an_error(make):
    sim = make()
    with pytest.raises(RuntimeError, match="break out of the loop"):
        for _ in sim.rounds():
            sim.model("small")
    assert [result.number for result in sim.rounds(1)] == [2]


def test_error_in_the_loop_loses_no_round(make):
    sim = make()
    with pytest.raises(ZeroDivisionError):
        for _ in sim.rounds():
            1 / 0  # noqa: B018
    assert [result.number for result in sim.rounds()] == [2, 3]
    whole = make()
    list(whole.rounds())
    assert results_of(sim.run) == results_of(whole.run)


def test_metrics_can_be_repeated_but_not_changed_after_a_round(make):
    sim = make()
    list(sim.rounds(1, metrics=["accuracy", my_metric]))
    assert [set(result.metrics["small"]) for result in sim.rounds(1, metrics=["accuracy", my_metric])] == [
        {"accuracy", "my_metric"}
    ]
    assert [set(result.metrics["small"]) for result in sim.rounds(1)] == [{"accuracy", "my_metric"}]
    with pytest.raises(ValueError, match="metrics can only be chosen before the first"):
        sim.rounds(1, metrics=["f1"])
    assert sim.recipe["rounds"] == 3


def test_metrics_of_a_redefined_function_replace_the_old_before_the_first_round(make):
    """As when a notebook's cell is run again."""

    def score(logits, labels):
        return 1.0

    first, sim = score, make(rounds=1)
    sim.rounds(metrics=[score])

    def score(logits, labels):
        return 2.0

    assert score is not first
    assert [result.metrics["small"] for result in sim.rounds(metrics=[score])] == [{"score": 2.0}]


def test_from_recipe_takes_overrides_seed_and_files(make):
    Path("mine.py").write_text("import fedloom as fl\nMETRICS = {'one': lambda logits, labels: 1.0}\n")
    sim = make()
    sim.to_recipe("recipe.toml")
    changed = fl.Simulation.from_recipe(
        "recipe.toml", sets=["training.epochs=2", 'evaluation.metrics=["one"]'], seed=5, extensions=["mine.py"]
    )
    assert (changed.recipe["seed"], changed.recipe["training"]["epochs"]) == (5, 2)
    assert [result.metrics["large"] for result in changed.rounds(1)] == [{"one": 1.0}]
    with pytest.raises(fl.RecipeError, match="OUT_EXISTS"):
        sim.to_recipe("recipe.toml")


def test_start_from_a_run_uses_its_weights(make):
    first = make(rounds=1)
    list(first.rounds())
    first.save("first")
    untrained, warm = make(rounds=1), make(rounds=1, start_from="first")
    for sim in (untrained, warm):
        list(sim.rounds())
    assert fingerprints(warm.run) != fingerprints(untrained.run)


def test_repr_is_short_and_says_what_runs(make):
    sim = make()
    assert repr(sim) == "<Simulation: heterofl on digits, 4 devices (large 50%, small 50%), 0 of 3 rounds>"
    list(sim.rounds(1))
    assert "1 of 1 round>" in repr(sim)


METHODS = st.sampled_from(["heterofl", "fedrolex", "fjord", fl.methods.HeteroFL(mask_unseen_labels=False)])
OPTIMIZERS = st.one_of(
    st.builds(lambda lr, momentum: fl.optimizers.sgd(lr=lr, momentum=momentum), st.floats(0.01, 1), st.floats(0, 0.9)),
    st.builds(lambda lr: fl.optimizers.adam(lr=lr), st.floats(0.001, 0.1)),
    st.just("sgd"),
)
PARTITIONS = st.one_of(
    st.just("iid"), st.builds(lambda alpha: fl.partitions.dirichlet(alpha=alpha, min_examples=1), st.floats(0.5, 5))
)
SIMULATIONS = st.fixed_dictionaries(
    {
        "method": METHODS,
        "partition": PARTITIONS,
        "devices": st.integers(2, 8),
        "seed": st.integers(0, 99),
        "rounds": st.integers(1, 50),
        "client": st.builds(
            fl.ClientConfig, epochs=st.integers(1, 3), batch_size=st.integers(1, 64), optimizer=OPTIMIZERS,
            last_batch=st.sampled_from(["keep", "drop", "wrap"]),
            loss=st.sampled_from(["cross_entropy", fl.losses.focal(gamma=1.0)]),
        ),
        "evaluation": st.fixed_dictionaries(
            {"every": st.integers(1, 5), "metrics": st.sampled_from([["accuracy"], ["f1", "auroc"], "accuracy"])}
        ),
        "compression": st.sampled_from([None, "float16", {"downlink": "float16"}]),
        "aggregation": st.sampled_from([None, "median", {"rule": "trimmed_mean", "min_contributors": 2}]),
    }
)  # fmt: skip


@given(SIMULATIONS)
def test_recipe_of_any_simulation_comes_back_the_same(parts):
    sim = tiny(**parts)
    document = sim.to_recipe()
    again = fl.Simulation.from_recipe(document)
    assert again.to_recipe() == document and repr(again) == repr(sim)


def test_recipe_as_file_is_the_same_simulation(make):
    sim = make(compression="float16", evaluation={"metrics": ["accuracy", fl.metrics.calibration_error(bins=5)]})
    document = sim.to_recipe("recipe.toml")
    assert fl.Simulation.from_recipe("recipe.toml").to_recipe() == document
    assert tomllib.loads(Path("recipe.toml").read_text())["evaluation"]["metrics"][1] == {
        "kind": "calibration_error", "bins": 5,
    }  # fmt: skip
