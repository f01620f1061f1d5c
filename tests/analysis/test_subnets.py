"""Subnets of a finished run: sampling, evaluation, stored results, and the best within a budget."""

import json
import os
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save

import fedloom
from fedloom.analysis import profiling, subnets
from fedloom.analysis.profiling import latency_ms
from fedloom.analysis.sizes_between import space_between
from fedloom.analysis.subnets import UNTRAINED, Budget, open_supernet, start_search
from fedloom.data import DATASETS
from fedloom.engines import worker_pool
from fedloom.engines.in_process import run_block
from fedloom.footprints import subnet_footprint
from fedloom.models import MODELS, build_model, compute_cost
from fedloom.recipe.errors import RecipeError
from fedloom.recipe.registries import Registries

SUPERNET = {
    "rounds": 1,
    "model": {"family": "mobilenet", "stem": 3},
    "tiers": [
        {"name": "large", "share": 0.5, "widths": [4, 8], "depths": [1, 2], "kernels": [5, 5]},
        {"name": "small", "share": 0.5, "widths": [2, 4], "depths": [1, 1], "kernels": [3, 3]},
    ],
    "method": {"name": "fedsup", "subnets": 2},
}


def open_run(run, space=None, data="data"):
    return open_supernet(run.folder, Registries(), data, space)


def search_run(run, count=500, seed=0, budget=None, max_examples=None, workers=1, space=None):
    """Start a search and evaluate all of its nets."""
    search = start_search(open_run(run, space), count, seed, budget, max_examples)
    for _ in search.measure(workers):
        pass
    return search


@pytest.fixture(scope="module")
def finished(document, tmp_path_factory):
    """A briefly trained supernet of 32 subnets, all of them evaluated."""
    finished_run = fedloom.run(document(**SUPERNET), out=tmp_path_factory.mktemp("supernet") / "run")
    search_run(finished_run)
    return finished_run


@pytest.fixture(scope="module")
def supernet_of_32(finished):
    return open_run(finished)


def last_accuracy(run):
    return {one.tier: one.value for one in run.final if (one.test, one.metric) == ("global", "accuracy")}


def test_sample_starts_with_extremes_and_tiers(finished):
    net = open_run(finished)
    large, small = net.tiers
    assert net.sample(1, 0) == [small, large]
    assert set(net.sample(10, 0)) > {small, large}


def test_sample_depends_only_on_seed(finished):
    net = open_run(finished)
    assert net.sample(10, 0) == net.sample(10, 0) == net.sample(20, 0)[:10]
    assert net.sample(10, 0) != net.sample(10, 1)
    for seed in range(5):
        assert len(set(net.sample(20, seed))) == 20


def test_sample_small_space_is_exhausted(finished):
    net = open_run(finished)
    assert net.space.count() == 32
    assert len(set(net.sample(32, 0))) == len(net.sample(1000, 0)) == 32
    assert all(subnet_footprint(one, net.global_model) for one in net.sample(32, 0))


@pytest.mark.parametrize("statistics", [{}, {"query": "per_device", "batch_size": 20}], ids=["pooled", "per device"])
def test_measure_tier_has_the_runs_accuracy(statistics, run):
    """Exactly, with static batch norm too."""
    finished_run = run(evaluation__statistics=statistics)
    search = search_run(finished_run)
    net = search.supernet
    rows = search.rows()
    for tier, size in zip(net.experiment.fleet.tiers, net.tiers, strict=True):
        assert rows[size].accuracy == last_accuracy(finished_run)[tier.name]
        assert (rows[size].parameters, rows[size].macs) == (
            compute_cost(tier.model).parameters,
            compute_cost(tier.model).macs,
        )
        assert rows[size].examples == 360


def test_measure_supernet_tiers_have_the_runs_accuracy(finished):
    search = search_run(finished)
    rows = search.rows()
    assert [rows[size].accuracy for size in search.supernet.tiers] == list(last_accuracy(finished).values())


def test_measure_known_nets_are_skipped(finished):
    before = (finished.folder / "subnets.jsonl").read_bytes()
    search = start_search(open_run(finished), 500, 0)
    assert list(search.measure()) == []
    assert (finished.folder / "subnets.jsonl").read_bytes() == before
    assert len(search.rows()) == 32


def test_measure_other_number_of_examples_is_measured_again(run):
    finished_run = run(rounds=1)
    complete, some = search_run(finished_run), search_run(finished_run, max_examples=50)
    assert {row.examples for row in complete.rows().values()} == {360}
    assert {row.examples for row in some.rows().values()} == {50}
    assert all(row.accuracy * 50 / 100 == pytest.approx(round(row.accuracy * 50 / 100)) for row in some.rows().values())
    assert search_run(finished_run, max_examples=10_000).rows() == complete.rows()
    assert len((finished_run.folder / "subnets.jsonl").read_text().splitlines()) == 2 * len(complete.nets)


def test_measure_truncated_line_is_measured_again(run):
    finished_run = run(rounds=1)
    rows = search_run(finished_run).rows()
    file = finished_run.folder / "subnets.jsonl"
    file.write_text(file.read_text()[:-20] + "\n")
    search = start_search(open_run(finished_run), 500, 0)
    assert len(search.rows()) == len(rows) - 1
    for _ in search.measure():
        pass
    assert search.rows() == rows


def test_measure_workers_give_identical_results(run, monkeypatch):
    """With static batch norm, so that workers also compute statistics."""
    tiers = [{"name": f"tier{width}", "share": 0.25, "width": width} for width in (1.0, 0.75, 0.5, 0.25)]
    finished_run = run(tiers=tiers, rounds=1, model__hidden=[4, 8])
    alone = search_run(finished_run).rows()
    (finished_run.folder / "subnets.jsonl").unlink()
    calls, search = [], start_search(open_run(finished_run), 500, 0)
    monkeypatch.setattr(worker_pool, "run_block", lambda work: calls.append(os.getpid()) or run_block(work))
    for _ in search.measure(workers=2):
        pass
    assert search.rows() == alone
    assert len(alone) > 4
    assert calls == []  # everything ran in the workers


@given(most=st.integers(0, 40_000), kind=st.sampled_from(["macs", "parameters"]), seed=st.integers(0, 3))
def test_best_never_exceeds_budget(supernet_of_32, most, kind, seed):
    """And no measured net that fits is better."""
    try:
        search = start_search(supernet_of_32, 8, seed, Budget(kind, most))
    except RecipeError:
        assert getattr(compute_cost(supernet_of_32.tiers[1]), kind) > most
        return
    net, row = search.best()
    assert getattr(row, kind) == getattr(compute_cost(net), kind) <= most
    fitting = [one for one in search.rows().values() if getattr(one, kind) <= most]
    assert row.accuracy == max(one.accuracy for one in fitting)


@pytest.mark.parametrize("kind", ["macs", "parameters"])
def test_sample_within_few_fitting_nets_adds_more(kind, finished, monkeypatch):
    monkeypatch.setattr(subnets, "MIN_FITTING_SHARE", 0.5)
    net = open_run(finished)
    costs = sorted(getattr(compute_cost(one), kind) for one in net.sample(32, 0))
    budget = Budget(kind, costs[8])  # nine of the 32 fit
    plain, more = net.sample(12, 0), net.sample_within(budget, 12, 0)
    assert more[: len(plain)] == plain
    assert sum(map(budget.fits, plain)) < sum(map(budget.fits, more)) == 6
    assert all(map(budget.fits, more[len(plain) :]))
    assert more == net.sample_within(budget, 12, 0)


def test_start_search_budget_below_smallest_is_refused(finished):
    least = compute_cost(open_run(finished).tiers[1]).macs
    assert start_search(open_run(finished), 8, 0, Budget("macs", least)).best()[1].macs == least
    with pytest.raises(RecipeError) as error:
        start_search(open_run(finished), 8, 0, Budget("macs", least - 1))
    (issue,) = error.value.issues
    assert (issue.code, error.value.source) == ("BUDGET_SMALL", "--macs")
    assert issue.message.endswith(f"the smallest takes {least:,}")


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (Budget("macs", 7), "no subnet fits in 7 MACs; the smallest takes 12,345,678"),
        (Budget("parameters", 1_000_000), "no subnet fits in 1,000,000 parameters; the smallest takes 12,345,678"),
        (Budget("latency_ms", 0.125), "no subnet fits in 0.125 ms on this machine; the smallest takes 1.23e+07"),
    ],
    ids=lambda one: one.kind if isinstance(one, Budget) else "",
)
def test_start_search_budget_message_formats_numbers(budget, message, supernet_of_32, monkeypatch):
    monkeypatch.setattr(Budget, "cost_of", lambda self, net: 12_345_678.0)
    with pytest.raises(RecipeError, match=re.escape(message)):
        start_search(supernet_of_32, 8, 0, budget)


def test_front_and_hypervolume_match_brute_force(finished):
    search = search_run(finished)
    rows, kept = list(search.rows().values()), search.front()
    for row in rows:
        is_dominated = any(
            one.macs <= row.macs and one.accuracy >= row.accuracy and one.point != row.point for one in rows
        )
        assert (row in kept) == (not is_dominated)
    most = max(row.macs for row in rows)
    steps = zip(kept, [*(row.macs for row in kept[1:]), most], strict=True)
    assert search.hypervolume() == pytest.approx(sum(row.accuracy * (end - row.macs) for row, end in steps))


@pytest.mark.parametrize("changes", [{}, SUPERNET], ids=["static batch norm", "supernet"])
def test_save_weights_reproduce_accuracy(changes, run, tmp_path):
    """The plain module with these weights has the accuracy that was measured."""
    finished_run = run(**changes)
    search = search_run(finished_run)
    net = search.nets[-1]
    search.save(net, tmp_path / "net.safetensors")
    module, data = net.module().eval(), DATASETS["digits"]()
    missing, unknown = module.load_state_dict(load_file(tmp_path / "net.safetensors"), strict=False)
    assert unknown == []
    assert all(name.endswith("num_batches_tracked") for name in missing)
    with torch.inference_mode():
        output = module(data.preparation(data.test.x))
    logits = output if isinstance(output, torch.Tensor) else output.logits
    right = float((logits.argmax(1) == data.test.y).float().mean())
    assert 100 * right == pytest.approx(search.rows()[net].accuracy, abs=0.3)
    loaded = fedloom.load_model(tmp_path / "net.safetensors")
    assert not any(part.training for part in loaded.modules())
    with torch.inference_mode():
        assert torch.allclose(loaded(data.test.x), logits, atol=1e-4)


def test_save_metadata_is_json_that_describes_the_model(run, tmp_path):
    finished_run = run()
    search = search_run(finished_run)
    net, row = search.nets[-1], search.rows()[search.nets[-1]]
    search.save(net, tmp_path / "net.safetensors")
    with safe_open(tmp_path / "net.safetensors", "pt") as file:
        about = json.loads(file.metadata()["about"])
    assert (about["family"], about["settings"]["hidden"]) == (net.family, [2, 4])
    assert about["settings"]["width"] == dict(net.settings)["width"]
    assert (about["input"]["stored_shape"], about["input"]["stored_dtype"]) == ([1, 8, 8], "uint8")
    assert about["output"] == {"name": "logits", "classes": 10}
    assert about["accuracy"] == {"percent": row.accuracy, "examples": 360, "of": "test"}
    assert about["trained"] == "not trained, a slice"
    assert (about["run"]["name"], about["run"]["sha256"]) == (finished_run.folder.name, finished_run.manifest["sha256"])
    assert str(tmp_path) not in json.dumps(about)


def test_load_model_tier_file_of_a_run_equals_its_model(run):
    """With a preparation that resizes and normalizes, which must be part of the module."""
    finished_run, x = run(rounds=1, data__preparation="fedsup_fashion"), DATASETS["digits"]().test.x[:5]
    for tier in ("large", "small"):
        loaded = fedloom.load_model(finished_run.folder / "models" / f"{tier}.safetensors")
        assert torch.equal(loaded(x), finished_run.model(tier)(x))


def test_load_model_file_of_an_export_folder_is_loaded_by_its_card(run, tmp_path):
    finished_run, x = run(rounds=1), DATASETS["digits"]().test.x[:5]
    exported = finished_run.export("safetensors", "small", out=tmp_path / "exported")
    assert torch.equal(fedloom.load_model(exported.file)(x), fedloom.load_model(exported.folder)(x))


@pytest.mark.parametrize(
    ("content", "words"), [(save({"x": torch.ones(1)}), "does not say which model"), (b"none", "cannot be read")]
)
def test_load_model_file_without_description_is_refused(content, words, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(RecipeError, match=words):
        fedloom.load_model(tmp_path / "x.safetensors")


def test_load_model_folder_of_a_run_names_what_to_do(run):
    with pytest.raises(RecipeError, match="open_run"):
        fedloom.load_model(run(rounds=1).folder)


def test_save_tier_equals_run_model(run, tmp_path, bits_equal):
    finished_run = run()
    search = search_run(finished_run)
    for tier, net in zip(("large", "small"), search.supernet.tiers, strict=True):
        search.save(net, tmp_path / f"{tier}.safetensors")
        mine, theirs = (
            load_file(place / f"{tier}.safetensors") for place in (tmp_path, finished_run.folder / "models")
        )
        assert mine.keys() == theirs.keys()
        assert all(bits_equal(mine[name], theirs[name]) for name in mine)


def test_open_supernet_method_space_and_named_space(run):
    own = {"widths": [[2, 4], [4, 8]]}
    finished_run = run(**{**SUPERNET, "method": {"name": "fedsup", "subnets": 2, "space": own}})
    assert [name for name, _ in open_run(finished_run).space.choices] == ["widths"]
    assert open_run(finished_run).space.count() == 4
    assert open_run(finished_run, "tiers").space.count() == 32
    assert open_run(finished_run).tiers[1] in open_run(finished_run).sample(1, 0)  # although it is not in the space


def test_open_supernet_default_settings_are_choices(run):
    finished_run = run(tiers=[{"name": "large", "share": 0.5}, {"name": "small", "share": 0.5, "width": 0.5}], rounds=1)
    assert open_run(finished_run, "tiers").space.choices == (("width", (0.5, 1.0)),)
    assert open_run(finished_run).space.choices == (("width", (0.5, 0.51, 1.0)),)
    assert len(search_run(finished_run).rows()) == 3


def test_open_supernet_width_tiers_any_width_between_is_searched(run):
    """One width for every number of channels that lies between those of the tiers."""
    tiers = [{"name": "large", "share": 0.5}, {"name": "small", "share": 0.5, "width": 0.25}]
    supernet = open_run(run(tiers=tiers, rounds=1, model__hidden=[4, 8]))
    nets = supernet.sample(500, 0)
    channels = {net.shapes()["classifier.weight"][1] for net in nets}
    assert channels == {2, 3, 4, 5, 6, 7, 8}
    assert len({tuple(net.shapes().items()) for net in nets}) == len(nets) == 7
    trained = {supernet.training_of(net): net for net in nets}
    assert set(trained) == {"as tier large", "as tier small", "not trained, a slice"}
    within = start_search(supernet, 500, 0, Budget("macs", compute_cost(supernet.global_model).macs - 1))
    best = max((net for net in within.nets if within.budget.fits(net)), key=lambda net: compute_cost(net).macs)
    assert best.shapes()["classifier.weight"][1] == 7


def test_open_supernet_depth_between_tiers_is_searched(run):
    tiers = [{"name": "large", "share": 0.5, "blocks": [3, 1]}, {"name": "small", "share": 0.5, "blocks": [1, 1]}]
    supernet = open_run(run(tiers=tiers, rounds=1, model={"family": "preresnet", "hidden": [2, 4]}))
    assert supernet.space.choices == (("blocks", ((1, 2, 3), (1,))),)


def test_open_supernet_depth_without_a_trained_head_is_no_choice(run):
    """There are heads after the second stage and after the last one, so a net of three stages is no slice."""
    tiers = [{"name": "large", "share": 0.5}, {"name": "small", "share": 0.5, "stages": 2}]
    model = {"family": "preactresnet", "hidden": [2, 2, 2, 4], "blocks": [1, 1, 1, 1], "head": {"cells": 1}}
    supernet = open_run(run(tiers=tiers, rounds=1, model=model, method={"name": "fedhen"}))
    assert supernet.space.choices == (("stages", (2, None)),)


def test_space_between_lists_of_different_length_have_nothing_between():
    large, small = (build_model("mlp", MODELS["mlp"], {"hidden": hidden}, (4,), 3) for hidden in ((8, 8), (8,)))
    assert space_between((large, small), large).choices == ()


def test_training_of_fjord_widths_are_trained(run):
    method = {"name": "fjord", "widths": [0.5, 0.75, 1.0]}
    supernet = open_run(run(method=method, rounds=1, model={"family": "mlp", "hidden": [8]}))
    trained = {dict(net.settings)["width"]: supernet.training_of(net) for net in supernet.sample(500, 0)}
    assert trained == {0.5: "as tier small", 0.75: "as a subnet", 1.0: "as tier large"}
    between = open_supernet(supernet.folder, Registries(), "data", "between")
    assert UNTRAINED in {between.training_of(net) for net in between.sample(500, 0)}


def test_examples_kind_recipe_with_validation_is_validation(run):
    finished_run = run(rounds=1, data__validation=100)
    search = start_search(open_run(finished_run), 500, 0)
    assert (search.examples_kind, search.examples) == ("validation", 100)
    assert start_search(open_run(run("other", rounds=1)), 500, 0).examples_kind == "test"


def test_open_supernet_one_tier_has_one_net(run):
    finished_run = run(tiers=[{"name": "all", "share": 1.0}], method={"name": "fedavg"}, rounds=1)
    search = search_run(finished_run)
    assert len(search.rows()) == 1
    assert (search.front(), search.hypervolume()) == ([search.best()[1]], 0.0)


@pytest.mark.parametrize(
    ("space", "code", "words"),
    [("papr", "SPACE_NAME", "papr"), ("code", "SPACE_SHAPE", "cannot be cut out of the largest tier's model")],
)
def test_open_supernet_invalid_space_is_refused(space, code, words, finished):
    with pytest.raises(RecipeError) as error:
        start_search(open_run(finished, space), 10, 0)
    assert error.value.issues[0].code == code
    assert words in error.value.issues[0].message


@pytest.mark.parametrize("status", ["running", "failed", "interrupted"])
def test_open_supernet_unfinished_run_is_refused(status, run):
    finished_run = run(rounds=1)
    manifest = json.loads((finished_run.folder / "manifest.json").read_text())
    (finished_run.folder / "manifest.json").write_text(json.dumps({**manifest, "status": status}))
    with pytest.raises(RecipeError, match=f"RUN_FOLDER: this run is not finished, it is {status}"):
        open_run(finished_run)


def test_open_supernet_run_without_server_model_is_refused(run):
    with pytest.raises(RecipeError, match="RUN_FOLDER: the run's method keeps no model on the server"):
        open_run(run(method={"name": "standalone"}, rounds=1))


def test_open_supernet_untrained_largest_tier_is_left_out(run):
    supernet = open_run(run(fleet={"eligible": ["small"]}, rounds=1))
    assert len(supernet.tiers) == 1
    assert supernet.global_model == supernet.tiers[0]


def test_open_supernet_other_data_is_refused(run):
    """A convolutional net also takes images of another size, so only the content differs."""
    finished_run = run(rounds=1)
    recipe = (finished_run.folder / "recipe.toml").read_text()
    assert recipe.count('"digits"') == 1
    (finished_run.folder / "recipe.toml").write_text(recipe.replace('"digits"', '"fashion-mini"'))
    with pytest.raises(RecipeError, match="RUN_DATA"):
        open_run(finished_run)


def test_open_supernet_missing_start_run_is_not_needed(run):
    first = run("first", rounds=1)
    second = run("second", rounds=1, start={"from": str(first.folder)})
    (first.folder / "models" / "large.safetensors").unlink()
    assert len(search_run(second).rows()) == 3


def test_latency_ms_is_median_after_warm_up(finished, monkeypatch):
    spans = [50.0] * 10 + [1.0] * 30 + [3.0] * 50 + [9.0] * 20
    clock = iter([moment for start, span in enumerate(spans) for moment in (start, start + span / 1000)])
    monkeypatch.setattr(profiling.time, "perf_counter", lambda: next(clock))
    net = open_run(finished).tiers[0].with_settings(stem=2)
    assert latency_ms(net) == pytest.approx(3.0)
    assert next(clock, None) is None
    assert latency_ms(net) == pytest.approx(3.0)  # cached, so that a net that fits keeps fitting


def test_start_search_latency_budget_is_kept(finished, monkeypatch):
    """On a simulated machine on which a multiply-add takes a nanosecond."""
    monkeypatch.setattr(subnets, "latency_ms", lambda net: compute_cost(net).macs / 1e6)
    fits = start_search(open_run(finished), 500, 0, Budget("latency_ms", 0.01)).best()
    assert fits[1] == start_search(open_run(finished), 500, 0, Budget("macs", 10_000)).best()[1]
    with pytest.raises(RecipeError, match=re.escape("no subnet fits in 0 ms on this machine; the smallest takes 0.00")):
        start_search(open_run(finished), 500, 0, Budget("latency_ms", 0.0))


def test_export_slice_that_was_not_trained_has_a_warning(run, tmp_path):
    finished_run = run(rounds=1)
    large, slice_, small = sorted(open_run(finished_run).sample(500, 0), key=lambda net: -compute_cost(net).macs)
    cards = [
        finished_run.export("safetensors", macs=compute_cost(net).macs, out=tmp_path / str(number)).card
        for number, net in enumerate((large, slice_, small))
    ]
    assert ["was not trained" in " ".join(card["warnings"]) for card in cards] == [False, True, False]
