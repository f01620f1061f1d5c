"""Sub-nets of a finished run: what is drawn, how it is judged, what is kept and which is the best."""

import json
import os
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

import fedloom
from fedloom.analysis import profiling, subnets
from fedloom.analysis.profiling import latency_ms
from fedloom.analysis.subnets import Budget, open_supernet, start_search
from fedloom.data import DATASETS
from fedloom.engines import worker_pool
from fedloom.engines.in_process import run_block
from fedloom.footprints import subnet_footprint
from fedloom.models import compute_cost
from fedloom.recipe.errors import RecipeError
from fedloom.recipe.registry import Registry

SUPERNET = {
    "rounds": 1,
    "model": {"family": "mobilenet", "stem": 3},
    "tiers": [
        {"name": "large", "share": 0.5, "widths": [4, 8], "depths": [1, 2], "kernels": [5, 5]},
        {"name": "small", "share": 0.5, "widths": [2, 4], "depths": [1, 1], "kernels": [3, 3]},
    ],
    "method": {"name": "fedsup", "subnets": 2},
}


def opened(run, space=None, data="data"):
    return open_supernet(run.folder, Registry(), data, space)


def judged(run, count=500, seed=0, budget=None, cap=None, workers=1, space=None):
    """A search, carried out."""
    search = start_search(opened(run, space), count, seed, budget, cap)
    for _ in search.measure(workers):
        pass
    return search


@pytest.fixture(scope="module")
def finished(document, tmp_path_factory):
    """A supernet of 32 sub-nets, trained a little, and every one of them judged."""
    done = fedloom.run(document(**SUPERNET), out=tmp_path_factory.mktemp("supernet") / "run")
    judged(done)
    return done


@pytest.fixture(scope="module")
def supernet_of_32(finished):
    return opened(finished)


def last_accuracy(run):
    return {one.tier: one.value for one in run.final if (one.test, one.metric) == ("global", "accuracy")}


def test_the_first_drawn_are_the_extremes_and_the_tiers(finished):
    net = opened(finished)
    large, small = net.tiers
    assert net.sample(1, 0) == [small, large]
    assert set(net.sample(10, 0)) > {small, large}


def test_what_is_drawn_depends_on_the_seed_alone(finished):
    net = opened(finished)
    assert net.sample(10, 0) == net.sample(10, 0) == net.sample(20, 0)[:10]
    assert net.sample(10, 0) != net.sample(10, 1)
    for seed in range(5):
        assert len(set(net.sample(20, seed))) == 20


def test_where_there_are_fewer_all_are_drawn(finished):
    net = opened(finished)
    assert net.space.count() == 32
    assert len(set(net.sample(32, 0))) == len(net.sample(1000, 0)) == 32
    assert all(subnet_footprint(one, net.global_model) for one in net.sample(32, 0))


@pytest.mark.parametrize("statistics", [{}, {"query": "per_device", "batch_size": 20}], ids=["pooled", "per device"])
def test_a_tiers_own_net_is_as_good_as_the_run_says(statistics, run):
    """To the last example, static batch norm and all."""
    done = run(evaluation__statistics=statistics)
    search = judged(done)
    net = search.supernet
    rows = search.rows()
    for tier, size in zip(net.experiment.fleet.tiers, net.tiers, strict=True):
        assert rows[size].accuracy == last_accuracy(done)[tier.name]
        assert (rows[size].parameters, rows[size].macs) == (compute_cost(tier.model).parameters, compute_cost(tier.model).macs)
        assert rows[size].examples == 360


def test_a_supernets_tiers_too(finished):
    search = judged(finished)
    rows = search.rows()
    assert [rows[size].accuracy for size in search.supernet.tiers] == list(last_accuracy(finished).values())


def test_what_is_known_is_not_measured_again(finished):
    before = (finished.folder / "subnets.jsonl").read_bytes()
    search = start_search(opened(finished), 500, 0)
    assert list(search.measure()) == []
    assert (finished.folder / "subnets.jsonl").read_bytes() == before
    assert len(search.rows()) == 32


def test_another_number_of_examples_is_another_measurement(run):
    done = run(rounds=1)
    whole, some = judged(done), judged(done, cap=50)
    assert {row.examples for row in whole.rows().values()} == {360}
    assert {row.examples for row in some.rows().values()} == {50}
    assert all(row.accuracy * 50 / 100 == pytest.approx(round(row.accuracy * 50 / 100)) for row in some.rows().values())
    assert judged(done, cap=10_000).rows() == whole.rows()
    assert len((done.folder / "subnets.jsonl").read_text().splitlines()) == 4


def test_a_line_cut_short_is_measured_again(run):
    done = run(rounds=1)
    rows = judged(done).rows()
    file = done.folder / "subnets.jsonl"
    file.write_text(file.read_text()[:-20] + "\n")
    search = start_search(opened(done), 500, 0)
    assert len(search.rows()) == 1
    for _ in search.measure():
        pass
    assert search.rows() == rows


def test_workers_change_nothing(run, monkeypatch):
    """Static batch norm, so that workers are asked for statistics as well."""
    tiers = [{"name": f"tier{width}", "share": 0.25, "width": width} for width in (1.0, 0.75, 0.5, 0.25)]
    done = run(tiers=tiers, rounds=1, model__hidden=[4, 8])
    alone = judged(done).rows()
    (done.folder / "subnets.jsonl").unlink()
    seen, search = [], start_search(opened(done), 500, 0)
    monkeypatch.setattr(worker_pool, "run_block", lambda work: seen.append(os.getpid()) or run_block(work))
    for _ in search.measure(workers=2):
        pass
    assert search.rows() == alone
    assert len(alone) == 4
    assert seen == []  # all was done elsewhere


@given(most=st.integers(0, 40_000), kind=st.sampled_from(["macs", "parameters"]), seed=st.integers(0, 3))
def test_the_best_never_exceeds_its_budget(supernet_of_32, most, kind, seed):
    """And nothing that was judged and fits is better."""
    try:
        search = start_search(supernet_of_32, 8, seed, Budget(kind, most))
    except RecipeError:
        assert getattr(compute_cost(supernet_of_32.tiers[1]), kind) > most
        return
    net, row = search.best()
    assert getattr(row, kind) == getattr(compute_cost(net), kind) <= most
    able = [one for one in search.rows().values() if getattr(one, kind) <= most]
    assert row.accuracy == max(one.accuracy for one in able)


@pytest.mark.parametrize("kind", ["macs", "parameters"])
def test_more_are_drawn_where_too_few_fit(kind, finished, monkeypatch):
    monkeypatch.setattr(subnets, "MIN_FITTING_SHARE", 0.5)
    net = opened(finished)
    costs = sorted(getattr(compute_cost(one), kind) for one in net.sample(32, 0))
    budget = Budget(kind, costs[8])  # nine of the 32 fit
    plain, more = net.sample(12, 0), net.sample_within(budget, 12, 0)
    assert more[: len(plain)] == plain
    assert sum(map(budget.fits, plain)) < sum(map(budget.fits, more)) == 6
    assert all(map(budget.fits, more[len(plain) :]))
    assert more == net.sample_within(budget, 12, 0)


def test_a_budget_below_the_smallest(finished):
    least = compute_cost(opened(finished).tiers[1]).macs
    assert start_search(opened(finished), 8, 0, Budget("macs", least)).best()[1].macs == least
    with pytest.raises(RecipeError) as error:
        start_search(opened(finished), 8, 0, Budget("macs", least - 1))
    (problem,) = error.value.issues
    assert (problem.code, error.value.source) == ("BUDGET_SMALL", "--macs")
    assert problem.message.endswith(f"the smallest takes {least:,}")


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (Budget("macs", 7), "no sub-net fits in 7 MACs; the smallest takes 12,345,678"),
        (Budget("parameters", 1_000_000), "no sub-net fits in 1,000,000 parameters; the smallest takes 12,345,678"),
        (Budget("latency_ms", 0.125), "no sub-net fits in 0.125 ms on this machine; the smallest takes 1.23e+07"),
    ],
    ids=lambda one: one.kind if isinstance(one, Budget) else "",
)
def test_large_numbers_are_spelled_out(budget, said, supernet_of_32, monkeypatch):
    monkeypatch.setattr(Budget, "spend", lambda self, net: 12_345_678.0)
    with pytest.raises(RecipeError, match=re.escape(said)):
        start_search(supernet_of_32, 8, 0, budget)


def test_the_front_and_its_hyper_volume(finished):
    search = judged(finished)
    rows, kept = list(search.rows().values()), search.front()
    for row in rows:
        bettered = any(one.macs <= row.macs and one.accuracy >= row.accuracy and one.point != row.point for one in rows)
        assert (row in kept) == (not bettered)
    most = max(row.macs for row in rows)
    steps = zip(kept, [*(row.macs for row in kept[1:]), most], strict=True)
    assert search.hypervolume() == pytest.approx(sum(row.accuracy * (end - row.macs) for row, end in steps))


@pytest.mark.parametrize("changes", [{}, SUPERNET], ids=["static batch norm", "supernet"])
def test_what_is_written_is_ready_to_be_used(changes, run, tmp_path):
    """The plain module with these weights gives as many right answers as were counted."""
    done = run(**changes)
    search = judged(done)
    net = search.nets[-1]
    search.save(net, tmp_path / "net.safetensors")
    module, data = net.module().eval(), DATASETS["digits"]()
    missing, unknown = module.load_state_dict(load_file(tmp_path / "net.safetensors"), strict=False)
    assert unknown == []
    assert all(name.endswith("num_batches_tracked") for name in missing)
    with torch.inference_mode():
        made = module(data.preparation(data.test.x))
    logits = made if isinstance(made, torch.Tensor) else made.logits
    right = float((logits.argmax(1) == data.test.y).float().mean())
    assert 100 * right == pytest.approx(search.rows()[net].accuracy, abs=0.3)
    with safe_open(tmp_path / "net.safetensors", "pt") as file:
        assert json.loads(file.metadata()["about"]) == {
            "family": net.family, "tier": f"subnet-{len(search.nets) - 1}", "settings": repr(dict(net.settings)),
        }  # fmt: skip


def test_a_tiers_model_is_written_to_the_bit(run, tmp_path, bits_equal):
    done = run()
    search = judged(done)
    for tier, net in zip(("large", "small"), search.supernet.tiers, strict=True):
        search.save(net, tmp_path / f"{tier}.safetensors")
        mine, theirs = (load_file(place / f"{tier}.safetensors") for place in (tmp_path, done.folder / "models"))
        assert mine.keys() == theirs.keys()
        assert all(bits_equal(mine[name], theirs[name]) for name in mine)


def test_a_methods_own_space_and_another(run):
    own = {"widths": [[2, 4], [4, 8]]}
    done = run(**{**SUPERNET, "method": {"name": "fedsup", "subnets": 2, "space": own}})
    assert [name for name, _ in opened(done).space.choices] == ["widths"]
    assert opened(done).space.count() == 4
    assert opened(done, "tiers").space.count() == 32
    assert opened(done).tiers[1] in opened(done).sample(1, 0)  # though it is no member of the space


def test_settings_that_a_tier_leaves_at_their_default(run):
    done = run(tiers=[{"name": "large", "share": 0.5}, {"name": "small", "share": 0.5, "width": 0.5}], rounds=1)
    assert opened(done).space.choices == (("width", (0.5, 1.0)),)
    assert len(judged(done).rows()) == 2


def test_one_tier_has_one_net(run):
    done = run(tiers=[{"name": "all", "share": 1.0}], method={"name": "fedavg"}, rounds=1)
    search = judged(done)
    assert len(search.rows()) == 1
    assert (search.front(), search.hypervolume()) == ([search.best()[1]], 0.0)


@pytest.mark.parametrize(
    ("space", "code", "words"),
    [("papr", "SPACE_NAME", "papr"), ("code", "SPACE_SHAPE", "cannot be cut out of the largest tier's model")],
)
def test_a_space_that_cannot_be(space, code, words, finished):
    with pytest.raises(RecipeError) as error:
        start_search(opened(finished, space), 10, 0)
    assert error.value.issues[0].code == code
    assert words in error.value.issues[0].message


@pytest.mark.parametrize("status", ["running", "failed", "interrupted"])
def test_a_run_that_is_not_finished(status, run):
    done = run(rounds=1)
    said = json.loads((done.folder / "manifest.json").read_text())
    (done.folder / "manifest.json").write_text(json.dumps({**said, "status": status}))
    with pytest.raises(RecipeError, match=f"RUN_FOLDER: this run is not finished, it is {status}"):
        opened(done)


def test_a_run_without_a_model_on_the_server(run):
    with pytest.raises(RecipeError, match="RUN_FOLDER: the run's method keeps no model on the server"):
        opened(run(method={"name": "standalone"}, rounds=1))


def test_a_run_that_did_not_train_its_largest_model_is_a_supernet_of_the_largest_it_trained(run):
    supernet = opened(run(fleet={"eligible": ["small"]}, rounds=1))
    assert len(supernet.tiers) == 1
    assert supernet.global_model == supernet.tiers[0]


def test_other_data_than_the_runs(run):
    """Images of another size go through a convolutional net too, so only the content can tell."""
    done = run(rounds=1)
    recipe = (done.folder / "recipe.toml").read_text()
    assert recipe.count('"digits"') == 1
    (done.folder / "recipe.toml").write_text(recipe.replace('"digits"', '"fashion-mini"'))
    with pytest.raises(RecipeError, match="RUN_DATA"):
        opened(done)


def test_a_run_needs_no_earlier_run_it_started_from(run):
    first = run("first", rounds=1)
    second = run("second", rounds=1, start={"from": str(first.folder)})
    (first.folder / "models" / "large.safetensors").unlink()
    assert len(judged(second).rows()) == 2


def test_a_time_is_the_median_of_a_hundred_after_ten(finished, monkeypatch):
    spans = [50.0] * 10 + [1.0] * 30 + [3.0] * 50 + [9.0] * 20
    clock = iter([moment for start, span in enumerate(spans) for moment in (start, start + span / 1000)])
    monkeypatch.setattr(profiling.time, "perf_counter", lambda: next(clock))
    net = opened(finished).tiers[0].with_settings(stem=2)
    assert latency_ms(net) == pytest.approx(3.0)
    assert next(clock, None) is None
    assert latency_ms(net) == pytest.approx(3.0)  # measured once, so that what fitted still does


def test_a_budget_of_time(finished, monkeypatch):
    """A made-up machine on which each multiply-add takes a nanosecond."""
    monkeypatch.setattr(subnets, "latency_ms", lambda net: compute_cost(net).macs / 1e6)
    fits = start_search(opened(finished), 500, 0, Budget("latency_ms", 0.01)).best()
    assert fits[1] == start_search(opened(finished), 500, 0, Budget("macs", 10_000)).best()[1]
    with pytest.raises(
        RecipeError, match=re.escape("no sub-net fits in 0 ms on this machine; the smallest takes 0.00")
    ):
        start_search(opened(finished), 500, 0, Budget("latency_ms", 0.0))
