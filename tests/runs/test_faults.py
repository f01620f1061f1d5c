"""Faults: what is lost, what is reported, and what must not change by a bit."""

import json
import math
import tomllib
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom import run as run_recipe
from fedloom.fleet import RoundContext
from fedloom.models import compute_cost
from fedloom.recipe.errors import RecipeError
from fedloom.recipe.load import dumps, load
from fedloom.recipe.registries import Registries
from fedloom.runs.build import assemble
from fedloom.runs.faults import NoQuorum
from fedloom.runs.loop import rounds
from fedloom.runs.state import RunState
from fedloom.tensors import fingerprint

FAST = [
    {"name": "large", "share": 0.5, "width": 1.0, "speed": 1e6, "bandwidth": 1e4},
    {"name": "small", "share": 0.5, "width": 0.5, "speed": 1e6, "bandwidth": 1e4},
]
ONE = [{"name": "all", "share": 1.0, "width": 1.0, "speed": 1e6, "bandwidth": 1e4}]
MIXED = {
    "name": "mixed", "strength": 0.0,
    "parts": [{"tiers": ["large"], "method": "fedavg"}, {"tiers": ["small"], "method": "fedhenn", "strength": 0.0}],
}  # fmt: skip
METHODS = {
    "heterofl": {"method": {"name": "heterofl"}},
    "fedrolex": {"method": {"name": "fedrolex"}},
    "standalone": {"method": {"name": "standalone"}},
    "fedhenn": {"method": {"name": "fedhenn", "probe_size": 5}, "data__public": {"examples": 10}},
    "ditto": {"method": {"name": "ditto"}, "tiers": ONE},
    "mixed": {"method": MIXED, "data__public": {"examples": 10}},
}


def made(document, tmp_path, faults, **changes):
    """An experiment of ten devices that is evaluated only at its end."""
    settings = {
        "data__dataset": "digits",
        "data__devices": 10,
        "evaluation": {"every": 99, "tests": ["global"]},
        **changes,
    }
    return assemble(load(document(**settings, faults=faults), Registries()), Registries(), tmp_path)


def run_all(experiment):
    """Server states before the first round and after each, client states likewise, and the results of the rounds."""
    client_states, steps = experiment.client_states, []
    first = experiment.method.start(experiment.fleet, experiment.fleet.seed)
    states, kept = [first], [{}]
    for done in rounds(experiment):
        steps.append(done)
        states.append(done.server)
        kept.append({name: fingerprint(parcel) for name, parcel in client_states.committed.items()})
    return states, kept, steps


def lost(experiment, code):
    """(round, device) of every event of this kind."""
    return {(number, one.device) for number, one in experiment.refusals if one.code == code}


def figures(done):
    return {row.metric: row.value for row in done.rows if not row.candidate and not row.tier}


def same(left, right):
    return fingerprint(left) == fingerprint(right)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("method", METHODS)
def test_faults_dropout_rounds_finish_without_silent_devices(method, share, document, tmp_path):
    experiment = made(document, tmp_path, {"dropout": share}, rounds=3, **METHODS[method])
    _, kept, steps = run_all(experiment)
    assert [done.number for done in steps[:3]] == [1, 2, 3]
    silent = lost(experiment, "SILENT")
    for done in steps[:3]:
        silent_now = {name for number, name in silent if number == done.number}
        assert len(silent_now) == round(10 * share)
        values = figures(done)
        assert (values["degraded"], values["asked"], values["replied"]) == (1.0, 10.0, 10.0 - len(silent_now))
        changed = {n for n, mark in kept[done.number].items() if kept[done.number - 1].get(n) != mark}
        assert not changed & silent_now, "a device whose reply is lost must not keep the round's state"
        if method in ("ditto", "standalone", "fedhenn"):
            assert len(changed) == 10 - len(silent_now)


def test_faults_dropout_share_holds_on_average(document, tmp_path):
    experiment = made(document, tmp_path, {"dropout": 0.25}, data__devices=10)
    counts = [len(experiment.faults.injector(context_of(experiment, n)).plan.silent) for n in range(1, 401)]
    assert set(counts) == {2, 3}
    assert sum(counts) / len(counts) == pytest.approx(2.5, abs=0.1)


def context_of(experiment, number):
    return RoundContext(number, experiment.faults.cohort(number), experiment.fleet, experiment.engine)


def test_faults_dropout_keeps_other_replies_unchanged(document, tmp_path):
    """The other replies are those of a round without dropout."""
    experiment = made(document, tmp_path, {"dropout": 0.5}, rounds=1)
    whole = made(document, tmp_path, {}, rounds=1)
    (first, _), _, (done,) = run_all(experiment)
    silent_now = {name for _, name in lost(experiment, "SILENT")}
    context = context_of(whole, 1)
    inboxes = {device: {"weights": device.footprint.read(first["weights"])} for device in context.cohort}
    replies = [one for one in context.ask(whole.method.train, inboxes) if one.device.name not in silent_now]
    expected = context.aggregate(first["weights"], map(whole.method._client_update, replies))
    assert same(done.server, {"weights": expected})


def region_entries(experiment, state, name) -> list[Tensor]:
    """The entries that only large devices hold, or those that both do."""
    (small,) = [tier for tier in experiment.fleet.tiers if tier.name == "small"]
    held = {key: torch.zeros(tensor.shape, dtype=torch.bool) for key, tensor in state["weights"].items()}
    inner = small.footprint.write(held, {k: torch.ones_like(t) for k, t in small.footprint.read(held).items()})
    return [t[inner[key] if name == "large+small" else ~inner[key]] for key, t in state["weights"].items()]


def moved(experiment, states, name):
    return [
        any(
            not torch.equal(one, two)
            for one, two in zip(*(region_entries(experiment, s, name) for s in pair), strict=True)
        )
        for pair in pairwise(states)
    ]


def test_faults_outage_freezes_region_until_tier_returns(document, tmp_path):
    faults = {"outages": [{"tier": "large", "from": 2, "to": 4}]}
    experiment = made(document, tmp_path, faults, rounds=6)
    states, _, steps = run_all(experiment)
    assert moved(experiment, states, "large") == [True, False, False, False, True, True]
    assert moved(experiment, states, "large+small") == [True] * 6
    ages = [{row.tier: row.value for row in done.rows if row.metric == "region_age"} for done in steps]
    assert [one.get("large") for one in ages] == [None, 1.0, 2.0, 3.0, None, None]
    assert all(one["large+small"] == 0.0 for one in ages[1:4])
    assert ["degraded" in figures(done) for done in steps] == [False, True, True, True, False, False]
    assert lost(experiment, "DEAD") == {(n, f"{index}") for n in (2, 3, 4) for index in range(5)}


def test_faults_old_region_is_reported_once(document, tmp_path):
    faults = {"outages": [{"tier": "large", "from": 1, "to": 99}]}
    experiment = made(document, tmp_path, faults, rounds=22, data__devices=4)
    for _ in rounds(experiment):
        pass
    assert lost(experiment, "REGION_AGE") == {(20, "")}
    assert experiment.state.region_ages == {"large": 22, "large+small": 0}


@pytest.mark.parametrize("method", ["heterofl", "ditto", "mixed", "fedhenn"])
def test_faults_below_quorum_changes_no_bit(method, document, tmp_path):
    faults = {"dropout": 0.5, "quorum": 0.6}
    experiment = made(document, tmp_path, faults, rounds=2, **METHODS[method])
    states, kept, _ = run_all(experiment)
    assert all(same(states[0], state) for state in states[1:3])
    assert kept[1:3] == [{}, {}]
    assert lost(experiment, "QUORUM") >= {(1, ""), (2, "")}
    just = made(document, tmp_path, {"dropout": 0.5, "quorum": 0.5}, rounds=1, **METHODS[method])
    states, kept, _ = run_all(just)
    assert (1, "") not in lost(just, "QUORUM")
    assert not same(states[0], states[1]) or kept[1]


def test_faults_region_below_min_coverage_is_unchanged(document, tmp_path):
    """Five large devices: weights that only they hold never get six updates, the others get ten."""
    states, _, steps = run_all(experiment := made(document, tmp_path, {"min_coverage": 6}, rounds=2))
    assert moved(experiment, states, "large") == [False, False]
    assert moved(experiment, states, "large+small") == [True, True]
    assert {row.tier: row.value for row in steps[1].rows if row.metric == "region_age"}["large"] == 2.0


@pytest.mark.parametrize("after", [3, 5])
def test_faults_max_failed_rounds_ends_run(after, document, tmp_path):
    experiment = made(document, tmp_path, {"dropout": 1.0, "max_failed_rounds": after}, rounds=9, data__devices=4)
    seen = []
    with pytest.raises(NoQuorum, match=f"{after} rounds in a row"):
        for done in rounds(experiment):
            seen.append(done.number)
    assert seen == list(range(1, after + 1))


def test_faults_successful_round_resets_failure_count(document, tmp_path):
    windows = [
        {"tier": tier, "from": first, "to": last} for tier in ("large", "small") for first, last in ((1, 4), (6, 9))
    ]
    experiment = made(document, tmp_path, {"outages": windows}, rounds=9, data__devices=4)
    assert len(list(rounds(experiment))) == 9
    assert experiment.state.failed_in_a_row == 4


@pytest.mark.parametrize("form", ["json", "npz"])
def test_faults_trace_selects_available_devices(form, document, tmp_path):
    table = np.zeros((10, 3), dtype=bool)
    table[:4, 0], table[4:, 1], table[::2, 2] = True, True, True
    path = tmp_path / f"trace.{form}"
    if form == "npz":
        np.savez(path, available=table)
    else:
        spans = {str(n): [[r + 1, r + 1] for r in range(3) if table[n, r]] for n in range(10)}
        path.write_text(json.dumps({"available": spans}))
    experiment = made(document, tmp_path, {"trace": str(path)}, rounds=3)
    _, _, steps = run_all(experiment)
    for column, done in enumerate(steps):
        assert set(done.traffic.devices) == {str(n) for n in range(10) if table[n, column]}
        assert figures(done)["degraded"] == 1.0  # ten are needed


def test_faults_round_without_available_devices_fails(document, tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"available": {str(n): [[2, 2]] for n in range(10)}}))
    states, _, _ = run_all(experiment := made(document, tmp_path, {"trace": str(path)}, rounds=2))
    assert [same(*pair) for pair in pairwise(states)] == [True, False]
    assert lost(experiment, "QUORUM") == {(1, "")}


def times_of(experiment):
    """By hand: bytes in both directions over bandwidth plus three passes over speed, with the device's factors."""
    found, held = {}, experiment.simulator.client_data
    for device in experiment.fleet.devices(1):
        pace, tier = experiment.faults.clock.device_speeds[device.name], FAST[0]
        size = sum(shape.numel() for shape in device.model.shapes().values())
        carried = (2 * 4 * size + 2) / (tier["bandwidth"] * pace.bandwidth)
        found[device.name] = carried + 3 * compute_cost(device.model).macs * held.count(device) / (
            tier["speed"] * pace.speed
        )
    return found


STRAGGLERS = {"kind": "lognormal", "speed": 0.8, "bandwidth": 0.8}


def test_faults_deadline_discards_slower_devices(document, tmp_path):
    took = times_of(made(document, tmp_path, {"stragglers": STRAGGLERS}, tiers=FAST))
    ordered = sorted(took.values())
    deadline = (ordered[6] + ordered[7]) / 2
    faults = {"stragglers": STRAGGLERS, "deadline": deadline}
    experiment = made(document, tmp_path, faults, tiers=FAST, rounds=1)
    _, _, (done,) = run_all(experiment)
    assert lost(experiment, "LATE") == {(1, name) for name, one in took.items() if one > deadline}
    assert figures(done)["simulated_seconds"] == pytest.approx(deadline)
    generous = made(document, tmp_path, {**faults, "deadline": 2 * ordered[-1]}, tiers=FAST, rounds=1)
    _, _, (done,) = run_all(generous)
    assert not generous.refusals
    assert figures(done)["simulated_seconds"] == pytest.approx(ordered[-1])


def test_faults_over_selection_uses_fastest_replies(document, tmp_path):
    took = times_of(made(document, tmp_path, {"stragglers": STRAGGLERS}, tiers=FAST))
    faults = {"stragglers": STRAGGLERS, "over_selection": 0.6}
    experiment = made(document, tmp_path, faults, tiers=FAST, rounds=3, fleet={"participation": 0.5})
    _, _, steps = run_all(experiment)
    for done in steps:
        asked = set(done.traffic.devices)
        assert (len(asked), done.traffic.replied) == (8, 5)
        spare = {name for number, name in lost(experiment, "NOT_NEEDED") if number == done.number}
        assert asked - spare == set(sorted(asked, key=took.get)[:5])
        assert figures(done)["simulated_seconds"] == pytest.approx(sorted(took[name] for name in asked)[4])
        assert figures(done).get("replied", 5.0) == 5.0


@pytest.mark.parametrize(
    ("how", "code"), [("nan", "NONFINITE"), ("inf", "NONFINITE"), ("huge", "HUGE"), ("shape", "SHAPE")]
)
@pytest.mark.parametrize("method", ["heterofl", "ditto"])
def test_faults_corrupt_replies_are_refused_by_gate(how, code, method, document, tmp_path):
    experiment = made(document, tmp_path, {"corrupt": {"devices": 3, "how": how}}, rounds=2, **METHODS[method])
    states, kept, steps = run_all(experiment)
    broken = {name for _, name in lost(experiment, code)}
    assert len(broken) == 3
    assert lost(experiment, code) == {(number, name) for number in (1, 2) for name in broken}
    assert figures(steps[0])["replied"] == 7.0
    assert all(bool(torch.isfinite(t).all()) for t in states[-1]["weights"].values())
    assert not broken & kept[-1].keys()


def test_faults_corrupt_empty_reply_is_refused(document, tmp_path):
    experiment = made(document, tmp_path, {"corrupt": {"devices": 0.2}}, rounds=1, method={"name": "standalone"})
    _, kept, _ = run_all(experiment)
    assert len(lost(experiment, "KEYS")) == 2
    assert len(kept[1]) == 8


EVERYTHING = {
    "dropout": 0.2, "stragglers": STRAGGLERS, "over_selection": 0.25, "deadline": 40.0, "quorum": 0.2,
    "min_coverage": 2, "corrupt": {"devices": 1}, "outages": [{"tier": "small", "from": 2, "to": 2}],
}  # fmt: skip


@pytest.mark.parametrize("method", ["heterofl", "mixed"])
def test_faults_number_of_workers_changes_nothing(method, document, tmp_path):
    changes = {**METHODS[method], "tiers": FAST, "data__devices": 10, "fleet": {"participation": 0.8}, "rounds": 3}
    settings = document(**changes, faults=EVERYTHING)
    alone, pooled = (run_recipe(settings, out=tmp_path / f"{n}", workers=n) for n in (1, 2))
    first, second = (json.loads((one.folder / "manifest.json").read_text()) for one in (alone, pooled))
    assert first["sha256"] == second["sha256"]
    assert alone.rows() == pooled.rows()
    events = [sorted((one.folder / "events.jsonl").read_text().splitlines()) for one in (alone, pooled)]
    assert events[0] == events[1]
    assert {json.loads(line)["code"] for line in events[0]} >= {"SILENT", "DEAD"}


@pytest.mark.parametrize("method", METHODS)
def test_faults_that_never_occur_change_no_bit(method, document, tmp_path):
    """With fault handling active but no fault, every bit is as without it."""
    harmless = {"outages": [{"tier": "all" if method == "ditto" else "small", "from": 90, "to": 99}]}
    plain, watched = (made(document, tmp_path, faults, rounds=2, **METHODS[method]) for faults in ({}, harmless))
    assert not plain.faults.applies
    assert watched.faults.applies
    (states, kept, steps), (others, theirs, again) = run_all(plain), run_all(watched)
    assert all(same(*pair) for pair in zip(states, others, strict=True))
    assert kept == theirs
    assert [done.rows for done in steps] == [done.rows for done in again]
    assert not watched.refusals


def test_faults_do_not_affect_evaluation(document, tmp_path):
    experiment = made(document, tmp_path, {"dropout": 0.9}, rounds=1, method={"name": "standalone"},
                      evaluation={"per_device": "always"})  # fmt: skip
    _, _, (done,) = run_all(experiment)
    assert {row.device for row in done.rows if row.device} == {str(n) for n in range(10)}


@pytest.mark.parametrize(
    ("faults", "place"),
    [
        ({"trace": "nowhere.json"}, ("faults", "trace")),
        ({"deadline": 3.0}, ("faults", "deadline")),
        ({"over_selection": 0.3}, ("faults", "over_selection")),
        ({"outages": [{"tier": "huge", "from": 1, "to": 2}]}, ("faults", "outages", 0, "tier")),
        ({"outages": [{"tier": "small", "from": 3, "to": 2}]}, ("faults", "outages", 0, "to")),
        ({"stragglers": {"kind": "lognormal", "sped": 1.0}}, ("faults", "stragglers", "sped")),
        ({"stragglers": {"kind": "file", "path": "nowhere"}}, ("faults", "stragglers")),
        ({"dropout": 1.5}, ("faults", "dropout")),
        ({"quroum": 0.5}, ("faults", "quroum")),
    ],
)
def test_faults_invalid_settings_are_refused_at_their_key(faults, place, document, tmp_path):
    with pytest.raises(RecipeError) as caught:
        made(document, tmp_path, faults)
    assert place in [problem.key_path for problem in caught.value.issues]


def test_run_state_json_roundtrip_restores_state(document, tmp_path):
    """A state that was saved as JSON and restored equals the original."""
    experiment = made(
        document, tmp_path, {"outages": [{"tier": "large", "from": 1, "to": 9}]}, rounds=3, data__devices=4
    )
    list(rounds(experiment))
    experiment.state.refused_in_a_row["3"] = 2
    again = RunState()
    again.restore(json.loads(json.dumps(experiment.state.as_json())))
    assert again == experiment.state
    assert again.region_ages["large"] == 3
    again.restore({})
    assert replace(again, run_id="") == RunState(run_id="")


def test_faults_toml_roundtrip_gives_same_recipe(document):
    recipe = load(document(faults=EVERYTHING), Registries()).recipe
    assert load(tomllib.loads(dumps(recipe.document())), Registries()).recipe == recipe
    assert math.isclose(recipe.faults.deadline or 0, 40.0)
