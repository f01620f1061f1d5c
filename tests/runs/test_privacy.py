"""Differential privacy of a run: epsilon, refused settings, and independence of workers and resuming."""

import importlib
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedloom.fleet import RoundContext
from fedloom.footprints import DPAggregator, coverage_mean
from fedloom.methods import METHODS, Method, MethodInfo
from fedloom.methods.depthfl import DepthFL
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.fedhen import FedHeN
from fedloom.methods.fedrolex import FedRolex
from fedloom.methods.heterofl import HeteroFL
from fedloom.methods.noside import NoSide
from fedloom.methods.scalefl import ScaleFL
from fedloom.methods.standalone import Standalone
from fedloom.recipe.errors import RecipeError
from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries
from fedloom.runs.build import assemble, check_deployment
from fedloom.runs.experiment import Experiment
from fedloom.runs.loop import aggregate_for
from fedloom.runs.privacy import AccountantMissing, Mechanism, compute_epsilon, summarize_privacy
from fedloom.runs.resume import verify
from fedloom.studies.compare import plan_comparison

PRIVATE: dict[str, Any] = {
    "fleet": {"participation": 0.5, "sampling": "poisson"},
    "model": {"family": "convnet", "hidden": [2, 4], "normalization": "group"},
    "method": {"name": "heterofl", "only_seen_rows": False},
    "privacy": {"clip": 1.0, "noise": 2.0},
}
COVERED: list[Method] = [
    FedAvg(weighting="uniform"), HeteroFL(only_seen_rows=False), FedRolex(), FedHeN(), NoSide(),
    NoSide(exit_head="trained_only"), DepthFL(ramp_up=2), ScaleFL(), Standalone(),
]  # fmt: skip


@pytest.fixture
def made(document: Callable[..., dict[str, Any]], tmp_path: Path) -> Callable[..., Experiment]:
    def make(**changes: Any) -> Experiment:
        return assemble(load(document(**{**PRIVATE, **changes}), Registries()), Registries(), tmp_path)

    return make


def refused(made: Callable[..., Experiment], **changes: Any) -> dict[str, str]:
    """Codes of all issues with their keys."""
    with pytest.raises(RecipeError) as found:
        made(**changes)
    return {one.code: ".".join(map(str, one.key_path)) for one in found.value.issues}


@pytest.mark.parametrize(("accountant", "expected"), [("rdp", 11.063), ("pld", 9.971)])
def test_mechanism_200_rounds_cost_reference_epsilon(accountant: Any, expected: float) -> None:
    assert Mechanism(1.0, 0.1, 1e-5, accountant).epsilon(200) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_mechanism_epsilon_equals_library_composition(accountant: Any) -> None:
    """Composition is shortened here to save time."""
    import dp_accounting
    from dp_accounting import pld, rdp

    event = dp_accounting.PoissonSampledDpEvent(0.3, dp_accounting.GaussianDpEvent(2.0))
    counting = {"rdp": rdp.RdpAccountant, "pld": pld.PLDAccountant}[accountant]()
    counting.compose(event, 7)
    assert Mechanism(2.0, 0.3, 1e-4, accountant).epsilon(7) == pytest.approx(counting.get_epsilon(1e-4), rel=1e-9)


def test_mechanism_epsilon_grows_with_rounds() -> None:
    costs = [Mechanism(2.0, 0.3, 1e-5).epsilon(rounds) for rounds in range(20)]
    assert costs[0] == 0.0
    assert costs == sorted(set(costs))
    assert Mechanism(4.0, 0.3, 1e-5).epsilon(9) < costs[9] < Mechanism(2.0, 0.6, 1e-5).epsilon(9)
    assert Mechanism(2.0, 0.3, 1e-7).epsilon(9) > costs[9]


def test_mechanism_epsilon_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    before = logging.getLogger("absl").level
    Mechanism(0.913, 0.117, 1e-5).epsilon(3)
    assert caplog.records == []
    assert logging.getLogger("absl").level == before


def test_run_private_has_epsilon_row_per_round(run: Callable[..., Any]) -> None:
    rows = [row for row in run(rounds=3, **PRIVATE).rows() if row.metric == "epsilon"]
    assert [(row.round, row.candidate, row.tier, row.device, row.test) for row in rows] == [
        (number, "", "", "", "") for number in (1, 2, 3)
    ]
    assert [row.value for row in rows] == [Mechanism(2.0, 0.5, 1e-5).epsilon(number) for number in (1, 2, 3)]


def test_run_without_privacy_has_no_epsilon(run: Callable[..., Any], made: Callable[..., Experiment]) -> None:
    assert not [row for row in run().rows() if row.metric == "epsilon"]
    experiment = made(privacy={})
    assert aggregate_for(experiment, 1) is experiment.aggregate is coverage_mean
    assert (compute_epsilon(experiment.loaded.recipe, 5), summarize_privacy(experiment.loaded.recipe)) == (None, "")


def test_summarize_privacy_reports_epsilon_and_delta(made: Callable[..., Experiment]) -> None:
    recipe = made(rounds=4).loaded.recipe
    cost = Mechanism(2.0, 0.5, 1e-5).epsilon(4)
    assert summarize_privacy(recipe) == f"privacy: epsilon {cost:.3f} at delta 1e-05 for every device, after 4 rounds"


def test_run_private_workers_and_repeats_change_no_bit(
    run: Callable[..., Any], manifest_of: Callable[..., Any]
) -> None:
    changes = {**PRIVATE, "data": {"dataset": "digits", "devices": 8}}
    runs = [run("one", **changes), run("again", **changes), run("two", options={"workers": 2}, **changes)]
    assert len({manifest_of(one)["sha256"] for one in runs}) == 1
    assert runs[0].rows() == runs[1].rows() == runs[2].rows()
    other = run("other", **{**changes, "privacy": {"clip": 1.0, "noise": 2.1}})
    assert manifest_of(other)["sha256"] != manifest_of(runs[0])["sha256"]


def test_verify_private_run_replays_same_noise_and_epsilon(run: Callable[..., Any], tmp_path: Path) -> None:
    finished = run(rounds=4, checkpoints={"every": 1}, **PRIVATE)
    found = verify(finished.folder, Registries(), tmp_path, 2, 1)
    assert (found.since, found.rounds, found.differences) == (2, 2, ())


@pytest.fixture
def manifest_of() -> Callable[..., Any]:
    from fedloom.runs.folder import read_manifest

    return lambda finished: read_manifest(finished.folder)


def test_run_private_with_empty_cohort_uploads_nothing(run: Callable[..., Any]) -> None:
    finished = run(rounds=3, **{**PRIVATE, "fleet": {"participation": 0.01, "sampling": "poisson"}})
    assert {row.value for row in finished.rows() if row.metric == "bytes_up"} == {0.0}


def test_aggregate_for_private_recipe_has_its_settings(made: Callable[..., Experiment]) -> None:
    experiment = made(data={"dataset": "digits", "devices": 10}, seed=5)
    aggregate = aggregate_for(experiment, 3)
    assert isinstance(aggregate, DPAggregator)
    assert (aggregate.clip, aggregate.noise, aggregate.seed, aggregate.round_number) == (1.0, 2.0, 5, 3)
    assert [expected for _, expected in aggregate.expected_participation] == [2.5, 2.5]
    assert [footprint for footprint, _ in aggregate.expected_participation] == [
        tier.footprint for tier in experiment.fleet.tiers
    ]
    assert aggregate_for(experiment, 4) != aggregate


def test_aggregate_for_redrawn_tiers_expects_shares(made: Callable[..., Experiment]) -> None:
    redrawn = made(fleet={"participation": 0.5, "sampling": "poisson", "assignment": "redrawn"}, data__devices=10)
    aggregate = aggregate_for(redrawn, 1)
    assert isinstance(aggregate, DPAggregator)
    assert [expected for _, expected in aggregate.expected_participation] == [2.5, 2.5]


@pytest.mark.parametrize("method", COVERED, ids=str)
@pytest.mark.parametrize("number", [1, 2])
def test_dp_aggregator_without_noise_equals_plain_round(
    method: Method, number: int, world_for: Callable[..., Any], difference: Callable[..., float]
) -> None:
    """A covered method computes its next state from one aggregate of updates with weight 1: without noise and with
    all devices, nothing differs. The aggregator itself refuses any other weight."""
    assert method.dp_uncovered == ""
    world = world_for(method, "preactresnet") if isinstance(method, FedHeN | NoSide) else world_for(method)
    fleet = world.fleet
    expected = [
        (
            method.aggregation_footprint(tier, fleet, number),
            float(sum(one.tier == tier.name for one in fleet.devices(1))),
        )
        for tier in fleet.active_tiers
    ]
    server = method.start(fleet, 0)
    assert server.keys() <= {"weights"}
    plain: RoundContext = world.context(world.engine(method), number)
    private = replace(
        world.context(world.engine(method), number), aggregate=DPAggregator(1e9, 0.0, expected, 0, number)
    )
    assert difference(method.round(server, plain), method.round(server, private)) < 1e-6
    assert method.finish(server, plain) is None


def test_dp_uncovered_is_empty_only_for_covered_methods(method: Method) -> None:
    assert method.dp_uncovered or method in COVERED


def test_dp_uncovered_default_is_not_empty() -> None:
    class Own(FedAvg):
        info = MethodInfo()
        dp_uncovered = Method.dp_uncovered

    assert Own().dp_uncovered


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ({"name": "heterofl"}, "labels"),
        ({"name": "heterofl", "only_seen_rows": False, "weighting": "examples"}, "number of its examples"),
        ({"name": "fedrolex", "weighting": "examples"}, "number of its examples"),
        ({"name": "fedhen", "report": True}, "keeps for reports"),
        ({"name": "noside", "report": True}, "keeps for reports"),
        ({"name": "decouple"}, "several aggregates"),
        ({"name": "fjord"}, "example count"),
        ({"name": "fedsup"}, "example count"),
        ({"name": "lgfedavg"}, "example count"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_check_privacy_uncovered_method_is_refused(
    method: dict[str, Any], reason: str, made: Callable[..., Experiment]
) -> None:
    exits = {"family": "preactresnet", "hidden": [2, 4], "blocks": [1, 1], "exit_after": 1}
    model = {"model": exits} if method["name"] in ("fedhen", "noside") else {}
    with pytest.raises(RecipeError, match=reason) as found:
        made(method=method, **model)
    assert [one.code for one in found.value.issues] == ["PRIVACY_METHOD"]


@pytest.mark.parametrize("name", ["fedin", "fedgkt", "fedhenn", "mixed", "centralized", "fedavg"])
def test_dp_uncovered_other_uploads_are_named(name: str) -> None:
    assert METHODS[name].from_settings({}, METHODS).dp_uncovered


def test_check_privacy_fixed_size_cohort_is_refused(made: Callable[..., Experiment]) -> None:
    assert refused(made, fleet={"participation": 0.5}) == {"PRIVACY_SAMPLING": "fleet.sampling"}


def test_check_privacy_static_batch_norm_is_refused(made: Callable[..., Experiment]) -> None:
    found = refused(made, model={"family": "convnet", "hidden": [2, 4], "normalization": "static_batch"})
    assert found == {"PRIVACY_STATISTICS": "model"}


def test_check_privacy_robust_rule_is_refused(made: Callable[..., Experiment]) -> None:
    assert refused(made, aggregation={"rule": "median"}) == {"PRIVACY_AGGREGATION": "aggregation.rule"}


@pytest.mark.parametrize("fault", [{"quorum": 0.5}, {"min_coverage": 2}, {"dropout": 0.1}, {"over_selection": 0.2}])
def test_check_privacy_faults_that_change_rounds_are_refused(
    fault: dict[str, float], made: Callable[..., Experiment]
) -> None:
    assert refused(made, faults=fault) == {"PRIVACY_FAULTS": f"faults.{next(iter(fault))}"}


def test_check_privacy_harmless_faults_are_accepted(made: Callable[..., Experiment]) -> None:
    assert made(faults={"max_failed_rounds": 9})


def test_check_privacy_reports_all_issues_at_once(made: Callable[..., Experiment]) -> None:
    found = refused(made, fleet={}, method={"name": "heterofl"}, privacy={"clip": 1.0})
    assert found.keys() == {"RECIPE_MISSING", "PRIVACY_SAMPLING", "PRIVACY_METHOD"}
    assert found["RECIPE_MISSING"] == "privacy.noise"


@pytest.mark.parametrize(
    ("privacy", "place"),
    [
        ({"noise": 1.0}, "privacy.noise"),
        ({"target_epsilon": 1.0}, "privacy.target_epsilon"),
        ({"clip": 1.0, "noise": 0.1, "accountant": "pld"}, "privacy.accountant"),
        ({"clip": 0.0, "noise": 1.0}, "privacy.clip"),
        ({"clip": 1.0, "noise": 0.0}, "privacy.noise"),
        ({"clip": 1.0, "noise": 1.0, "delta": 1.0}, "privacy.delta"),
    ],
)
def test_load_invalid_privacy_settings_are_refused(
    privacy: dict[str, Any], place: str, made: Callable[..., Experiment]
) -> None:
    assert list(refused(made, privacy=privacy).values()) == [place]


def test_check_privacy_exceeded_budget_is_refused(made: Callable[..., Experiment]) -> None:
    cost = [Mechanism(2.0, 0.5, 1e-5).epsilon(rounds) for rounds in range(11)]
    budget = {"clip": 1.0, "noise": 2.0, "target_epsilon": (cost[6] + cost[7]) / 2}
    assert made(rounds=6, privacy=budget)
    with pytest.raises(RecipeError, match=rf"10 rounds would cost epsilon {cost[10]:.3f}") as found:
        made(rounds=10, privacy=budget)
    (problem,) = found.value.issues
    assert (problem.code, problem.key_path) == ("PRIVACY_BUDGET", ("privacy", "target_epsilon"))
    assert "enough for 6 of them" in problem.hint


def test_run_refused_for_privacy_writes_nothing(run: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(RecipeError):
        run("never", **{**PRIVATE, "fleet": {}})
    assert list(tmp_path.iterdir()) == []


def test_check_privacy_without_accountant_names_the_extra(
    made: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def missing(name: str, package: str | None = None) -> Any:
        if name.startswith("dp_accounting"):
            raise ImportError(f"No module named {name!r}")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", missing)
    mechanism = Mechanism(1.2345, 0.5, 1e-5)  # not in the cache yet
    with pytest.raises(AccountantMissing):
        mechanism.epsilon(2)
    with pytest.raises(RecipeError, match=r"pip install 'fedloom\[privacy\]'") as found:
        made(privacy={"clip": 1.0, "noise": 1.2345})
    assert [one.code for one in found.value.issues] == ["EXTRA_MISSING"]
    assert made(privacy={})


def test_plan_comparison_controls_keep_privacy(document: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    loaded = load(document(**PRIVATE), Registries())
    controls = ("standalone", "small-for-all", "drop-the-small")
    planned = plan_comparison(loaded, Registries(), 1, controls, tmp_path / "home", tmp_path)
    for (experiment,) in planned.experiments.values():
        assert isinstance(aggregate_for(experiment, 1), DPAggregator)


def test_check_deployment_private_recipe_is_refused(made: Callable[..., Experiment]) -> None:
    experiment = made()
    with pytest.raises(RecipeError, match="seed") as found:
        check_deployment(experiment.loaded, experiment.method)
    assert [one.code for one in found.value.issues] == ["SIMULATION_ONLY"]
