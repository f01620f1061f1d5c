"""Mixed fleets: every part trains as if it were alone, and the alignment target comes from all of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.client import Task
from fedloom.engines import WorkerContext, WorkerPool
from fedloom.fleet import Device, DeviceModel, Engine, Reply, Request, RoundContext, draw_cohort
from fedloom.methods import METHODS, Method, fleet_problem
from fedloom.methods.fedhen import FedHeN
from fedloom.methods.fedhenn import FedHeNN
from fedloom.methods.fedsup import FedSup
from fedloom.methods.fjord import FjORD
from fedloom.methods.heterofl import HeteroFL
from fedloom.methods.mixed import MethodPart, Mixed
from fedloom.methods.standalone import Standalone
from fedloom.models import Model
from fedloom.tensors import Parcel

World = Any
Build = Callable[..., Model]
SIZES = (8, 8, 5, 9, 12, 7)
OWN_PULL = FedHeNN(strength=0.5, growth="none", probe_size=6)


pytestmark = pytest.mark.slow


@dataclass
class RecordingEngine:
    """An engine that records everything it is asked."""

    engine: Engine
    asked: list[tuple[Task, Mapping[Device, Parcel]]] = field(default_factory=list)

    def ask(self, request: Request) -> list[Reply]:
        self.asked.append((request.task, request.inboxes))
        return list(self.engine.ask(request))

    def commit(self, round_number: int) -> None:
        self.engine.commit(round_number)

    def close(self) -> None:
        self.engine.close()


@dataclass(frozen=True)
class Case:
    """A fleet and its parts."""

    models: tuple[tuple[str, str, dict[str, Any]], ...]  # tier, family, settings
    parts: tuple[MethodPart, ...]

    def world(self, world: Callable[..., Any], build: Build, **changes: Any) -> World:
        models = [(tier, build(family, **settings)) for tier, family, settings in self.models]
        return world(models=models, **{"sizes": SIZES, **changes})

    def mixed(self, align: bool = False, **settings: Any) -> Mixed:
        parts = tuple(replace(part, align=align and part is self.parts[-1]) for part in self.parts)
        return Mixed(**{"growth": "none", "probe_size": 8, "strength": 0.0, **settings, "parts": parts})


CASES = {
    "heterofl-fedhenn": Case(
        (("a", "convnet", {"width": 1.0}), ("b", "convnet", {"width": 0.5}), ("c", "lenet", {"hidden": (3,)})),
        (MethodPart(("a", "b"), HeteroFL()), MethodPart(("c",), OWN_PULL)),
    ),
    "fedhen-standalone": Case(
        (("a", "preactresnet", {"stages": 1}), ("b", "preactresnet", {}), ("c", "preactresnet", {"width": 0.5})),
        (MethodPart(("a", "b"), FedHeN()), MethodPart(("c",), Standalone())),
    ),
    "fedsup-fedhenn": Case(
        (("a", "convnet", {"width": 1.0}), ("b", "convnet", {"width": 0.5}), ("c", "mlp", {})),
        (MethodPart(("a", "b"), FedSup()), MethodPart(("c",), replace(OWN_PULL, kernels_on="devices"))),
    ),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
FIRST = CASES["heterofl-fedhenn"]


@dataclass(frozen=True)
class Result:
    server: Parcel
    device_states: Mapping[str, Parcel]


def train_mixed(sim: World, method: Mixed, rounds: int = 2, participation: float = 1.0, **engine: Any) -> Result:
    assert fleet_problem(method, sim.fleet) is None
    made = sim.engine(method, **engine)
    server = sim.play(method, made, rounds, participation)
    assert sim.refusals == []
    return Result(server, dict(made.client_states.committed))


def train_alone(sim: World, part: MethodPart, rounds: int = 2, participation: float = 1.0) -> Result:
    """The part's method in a fleet where only its tiers take part, with the same cohorts."""
    method, fleet = part.method, sim.fleet.restrict_tiers(part.tiers)
    engine = replace(sim, fleet=fleet).engine(method)
    server = method.start(fleet, sim.seed)
    for number in range(1, rounds + 1):
        drawn = [one for one in draw_cohort(sim.fleet, participation, number) if one.tier in part.tiers]
        cohort = [fleet.device(int(one.name), number) for one in drawn]
        server = method.round(server, RoundContext(number, cohort, fleet, engine, public=sim.public))
        engine.commit(number)
    return Result(server, dict(engine.client_states.committed))


def part_result(learned: Result, number: int, sim: World, part: MethodPart) -> Result:
    prefix = f"{number}:"
    own = {device.name for device in sim.fleet.devices(1) if device.tier in part.tiers}
    return Result(
        {name.removeprefix(prefix): one for name, one in learned.server.items() if name.startswith(prefix)},
        {name: one for name, one in learned.device_states.items() if name in own},
    )


def results_equal(left: Result, right: Result, parcels_equal: Callable[..., bool]) -> bool:
    remembered = left.device_states.keys() == right.device_states.keys() and all(
        parcels_equal(one, right.device_states[name]) for name, one in left.device_states.items()
    )
    return remembered and parcels_equal(left.server, right.server)


@every_case
@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize(
    "settings",
    [{"align": True, "strength": 0.0}, {"align": False, "strength": 3.0}],
    ids=["zero strength", "no alignment"],
)
def test_mixed_zero_strength_trains_parts_as_if_alone(
    case: Case,
    settings: Any,
    participation: float,
    world: Callable[..., Any],
    tiny_model: Build,
    parcels_equal: Callable[..., bool],
) -> None:
    sim, mixed = case.world(world, tiny_model), case.mixed(**settings)
    both = train_mixed(sim, mixed, 3, participation)
    for number, part in enumerate(mixed.parts):
        found, expected = part_result(both, number, sim, part), train_alone(sim, part, 3, participation)
        assert results_equal(found, expected, parcels_equal)
        assert found.server or found.device_states


@every_case
def test_mixed_only_aligned_parts_change(
    case: Case, world: Callable[..., Any], tiny_model: Build, parcels_equal: Callable[..., bool]
) -> None:
    sim, mixed = case.world(world, tiny_model), case.mixed(align=True, strength=3.0)
    both = train_mixed(sim, mixed)
    others, drawn = (
        results_equal(part_result(both, number, sim, part), train_alone(sim, part), parcels_equal)
        for number, part in enumerate(mixed.parts)
    )
    assert (others, drawn) == (True, False)


def test_mixed_alignment_works_with_every_method(
    world: Callable[..., Any], tiny_model: Build, parcels_equal: Callable[..., bool]
) -> None:
    case = CASES["fedsup-fedhenn"]
    parts = tuple(replace(part, align=True) for part in case.parts)
    sim, mixed = case.world(world, tiny_model), replace(case.mixed(strength=3.0), parts=parts)
    both = train_mixed(sim, mixed)
    for number, part in enumerate(parts):
        assert not results_equal(part_result(both, number, sim, part), train_alone(sim, part), parcels_equal)


def test_mixed_growing_strength_sends_nothing_in_first_round(
    world: Callable[..., Any], tiny_model: Build, parcels_equal: Callable[..., bool]
) -> None:
    sim, mixed = FIRST.world(world, tiny_model), FIRST.mixed(align=True, strength=3.0, growth="root")
    both = train_mixed(sim, mixed, rounds=1)
    for number, part in enumerate(mixed.parts):
        assert results_equal(part_result(both, number, sim, part), train_alone(sim, part, rounds=1), parcels_equal)


def kernel_of(sim: World, model: Model, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    block = {name: one.unsqueeze(0) for name, one in weights.items()}
    features = model.features(block, sim.dataset.preparation(x).unsqueeze(0))[0]
    return features @ features.T


def sent_target(engine: RecordingEngine) -> Parcel:
    """The common bundles in the inboxes of aligned devices."""
    (found,) = [
        inbox
        for task, inboxes in engine.asked
        if task.ref[-1] in ("train", "train_at_home")
        for inbox in list(inboxes.values())[:1]
        if "fleet.target" in inbox
    ]
    return found


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("probe_size", [4, 12])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_mixed_mean_kernel_weights_parts_by_devices(
    participation: float, probe_size: int, world: Callable[..., Any], tiny_model: Build
) -> None:
    """The model before the round: the tier's slice of the global model, or the device's own."""
    sim = FIRST.world(world, tiny_model)
    mixed = FIRST.mixed(align=True, strength=3.0, probe_size=probe_size)
    inner = sim.engine(mixed)
    server, engine = sim.play(mixed, inner, 2), RecordingEngine(inner)
    context = sim.context(engine, 3, participation)
    mixed.round(server, context)
    inbox = sent_target(engine)
    x, target = inbox["fleet.public"]["x"], inbox["fleet.target"]
    held = mixed.eval_targets(server)["server"]
    kernels = [
        kernel_of(sim, one.model, inner.client_states.committed[one.name]["weights"], x)
        if one.tier == "c"
        else kernel_of(sim, one.model, held.weights(one), x)  # type: ignore[union-attr, arg-type]
        for one in context.cohort
    ]
    found = target["kernel"] if "kernel" in target else target["features"] @ target["features"].T
    assert x.shape[0] == probe_size
    assert torch.allclose(found, torch.stack(kernels).mean(0), atol=1e-10)


def test_mixed_training_of_one_part_reaches_other(
    world: Callable[..., Any], tiny_model: Build, parcels_equal: Callable[..., bool]
) -> None:
    sim, mixed = FIRST.world(world, tiny_model), FIRST.mixed(align=True, strength=3.0)
    first = mixed.start(sim.fleet, 0)
    other = {**first, "0:weights": {name: one + torch.randn_like(one) for name, one in first["0:weights"].items()}}
    engines = [sim.engine(mixed) for _ in range(2)]
    for server, engine in zip((first, other), engines, strict=True):
        mixed.round(server, sim.context(engine))
        engine.commit(1)
    one, two = (dict(engine.client_states.committed) for engine in engines)
    assert one.keys() == two.keys() == {"4", "5"}
    assert not any(parcels_equal(one[name], two[name]) for name in one)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("kernel", ["linear", "rbf", "procrustes"])
def test_mixed_unrelated_families_are_aligned(
    kernel: Any, world: Callable[..., Any], tiny_model: Build, difference: Callable[..., float]
) -> None:
    families = ("convnet", "preactresnet", "mlp", "lenet")
    sim = world(models=[(name, tiny_model(name)) for name in families], sizes=(8,) * 8)
    methods = (HeteroFL(), FedHeN(), Standalone(), FedHeNN(strength=0.5, growth="none", share="weights"))
    parts = tuple(MethodPart((name,), method, align=True) for name, method in zip(families, methods, strict=True))
    mixed = Mixed(strength=2.0, growth="none", probe_size=8, kernel=kernel, parts=parts)
    drawn, free = (train_mixed(sim, one) for one in (mixed, replace(mixed, strength=0)))
    assert set(drawn.device_states) == {"4", "5", "6", "7"}
    assert drawn.server.keys() == {"0:weights", "1:weights", "3:weights"}
    assert all(difference({name: one}, {name: free.server[name]}) > 1e-4 for name, one in drawn.server.items())
    assert all(difference(one, free.device_states[name]) > 1e-4 for name, one in drawn.device_states.items())


def test_mixed_own_and_common_alignment_add_up(
    world: Callable[..., Any], tiny_model: Build, parcels_equal: Callable[..., bool]
) -> None:
    sim = FIRST.world(world, tiny_model)
    both = FIRST.mixed(align=True, strength=3.0)
    without_own = replace(both, parts=(both.parts[0], replace(both.parts[1], method=replace(OWN_PULL, strength=0))))
    made = [train_mixed(sim, one).device_states for one in (both, without_own, replace(both, strength=0))]
    assert len({tuple(float(m[n]["weights"]["hidden.0.weight"].sum()) for n in m) for m in made}) == 3


@every_case
def test_mixed_two_processes_give_same_bits(
    case: Case, world: Callable[..., Any], tiny_model: Build, parcels_equal: Callable[..., bool]
) -> None:
    """Blocks of one device, because a single block would stay in the main process."""
    sim, mixed = case.world(world, tiny_model), case.mixed(align=True, strength=3.0)
    expected = train_mixed(sim, mixed, devices_per_block=1)
    pool = WorkerPool(2)
    pooled = sim.engine(mixed, devices_per_block=1, executor=pool)
    pool.register(WorkerContext(pooled, sim.fleet, lambda ref: mixed.find(*ref)))
    try:
        found = Result(sim.play(mixed, pooled), dict(pooled.client_states.committed))
        assert pool.pool
    finally:
        pool.close()
    assert sim.refusals == []
    assert results_equal(found, expected, parcels_equal)


@every_case
def test_mixed_every_tier_is_evaluated_once(case: Case, world: Callable[..., Any], tiny_model: Build) -> None:
    sim, mixed = case.world(world, tiny_model), case.mixed(align=True, strength=3.0)
    engine = sim.engine(mixed)
    candidates = mixed.eval_targets(sim.play(mixed, engine))
    tiers = [tier for one in candidates.values() for tier in one.tiers]
    assert sorted(tiers) == ["a", "b", "c"]
    rows = sim.evaluator().rows(candidates, sim.fleet, sim.context(engine, 3).ask, 2, per_device=False)
    for test in ("local", "global"):
        evaluated = sorted(row.tier for row in rows if row.test == test and row.metric == "accuracy")
        assert evaluated == ["a", "b", "c"]
    assert sim.refusals == []


def test_mixed_tier_is_evaluated_as_in_own_fleet(world: Callable[..., Any], tiny_model: Build) -> None:
    sim, mixed = FIRST.world(world, tiny_model), FIRST.mixed()
    engine = sim.engine(mixed)
    server = sim.play(mixed, engine)
    found = evaluate(sim, mixed.eval_targets(server), engine)
    for part in mixed.parts:
        own = replace(sim, fleet=sim.fleet.restrict_tiers(part.tiers))
        expected = train_alone(sim, part)
        part_engine = own.engine(part.method)
        part_engine.client_states.committed = expected.device_states
        for key, value in evaluate(own, part.method.eval_targets(expected.server), part_engine).items():
            assert found[key] == value


def evaluate(sim: World, candidates: Any, engine: Any) -> dict[tuple[str, ...], float]:
    rows = sim.evaluator().rows(candidates, sim.fleet, sim.context(engine, 3).ask, 2, per_device=True)
    return {(row.candidate, row.tier, row.device, row.test, row.metric): row.value for row in rows}


def test_mixed_equal_target_names_are_made_unique(world: Callable[..., Any], tiny_model: Build) -> None:
    sim = FIRST.world(world, tiny_model)
    parts = (MethodPart(("a",), Standalone()), MethodPart(("b",), HeteroFL()), MethodPart(("c",), OWN_PULL))
    mixed = Mixed(strength=0, parts=parts)
    candidates = mixed.eval_targets(mixed.start(sim.fleet, 0))
    assert {name: one.tiers for name, one in candidates.items()} == {
        "personal": ("a",),
        "server": ("b",),
        "personal-3": ("c",),
    }
    for name, method in (("personal", parts[0].method), ("personal-3", parts[2].method)):
        one = candidates[name]
        assert isinstance(one, DeviceModel)
        assert mixed.find(*one.load_ref) == method.personal_model  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("tiers", "reason"),
    [
        ((("a",), ("c",)), "no part of method.parts is for the tier 'b'"),
        ((("a", "b"), ("b", "c")), "'b' belongs to 2 parts"),
        ((("a", "a", "b"), ("c",)), "'a' belongs to 2 parts"),
        ((("a", "b"), ("c", "d")), "'d', which does not take part"),
        ((("a", "b", "c"), ()), "no tiers"),
        ((), "no part of method.parts is for the tier 'a'"),
    ],
)
def test_mixed_tier_without_exactly_one_part_is_refused(
    tiers: tuple[tuple[str, ...], ...], reason: str, world: Callable[..., Any], tiny_model: Build
) -> None:
    fleet = FIRST.world(world, tiny_model).fleet
    refused = fleet_problem(Mixed(parts=tuple(MethodPart(names, Standalone()) for names in tiers)), fleet)
    assert refused is not None
    assert reason in refused


def test_mixed_inactive_tier_needs_no_part(world: Callable[..., Any], tiny_model: Build) -> None:
    fleet = replace(FIRST.world(world, tiny_model).fleet, eligible_tiers=("a", "b"))
    mixed = Mixed(parts=(MethodPart(("a",), HeteroFL()), MethodPart(("b",), Standalone())))
    assert fleet_problem(mixed, fleet) is None
    assert "'c', which does not take part" in str(fleet_problem(FIRST.mixed(), fleet))


@pytest.mark.parametrize(
    ("method", "assignment"), [(HeteroFL(), "fixed"), (FedHeNN(share="weights"), "fixed"), (Standalone(), "redrawn")]
)
def test_mixed_problem_of_part_is_reported(
    method: Method, assignment: Any, world: Callable[..., Any], tiny_model: Build
) -> None:
    """With the part's own message; models are compared among the part's tiers only."""
    fleet = replace(FIRST.world(world, tiny_model).fleet, assignment=assignment)
    mixed = Mixed(parts=(MethodPart(("a",), HeteroFL()), MethodPart(("b", "c"), method)))
    refused = fleet_problem(mixed, fleet)
    assert refused is not None
    assert refused == fleet_problem(method, fleet.restrict_tiers(("b", "c")))


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_mixed_finish_runs_parts_that_have_one(
    participation: float, world: Callable[..., Any], tiny_model: Build, parcels_equal: Callable[..., bool]
) -> None:
    sim, mixed = FIRST.world(world, tiny_model), FIRST.mixed()
    engine = sim.engine(mixed)
    server = sim.play(mixed, engine, 2, participation)
    ended = mixed.finish(server, sim.context(engine, 3))
    engine.commit(3)
    assert ended is not None
    assert parcels_equal({"w": ended["0:weights"]}, {"w": server["0:weights"]})
    part = mixed.parts[1]
    own = sim.fleet.restrict_tiers(part.tiers)
    fedhenn = train_alone(sim, part, 2, participation)
    part_engine = replace(sim, fleet=own).engine(part.method)
    part_engine.client_states.committed = fedhenn.device_states
    expected = part.method.finish(
        fedhenn.server, RoundContext(3, own.eligible_devices(3), own, part_engine, public=sim.public)
    )
    part_engine.commit(3)
    assert expected is not None
    found = part_result(Result(ended, dict(engine.client_states.committed)), 1, sim, part)
    assert results_equal(found, Result(expected, dict(part_engine.client_states.committed)), parcels_equal)


def test_mixed_finish_without_any_part_is_none(world: Callable[..., Any], tiny_model: Build) -> None:
    sim = FIRST.world(world, tiny_model)
    last = replace(FIRST.parts[1], method=replace(OWN_PULL, last_round=False))
    mixed = replace(FIRST.mixed(), parts=(FIRST.parts[0], last))
    engine = RecordingEngine(sim.engine(mixed))
    assert mixed.finish(mixed.start(sim.fleet, 0), sim.context(engine)) is None
    assert engine.asked == []


def test_mixed_part_without_devices_is_unchanged(
    world: Callable[..., Any], tiny_model: Build, parcels_equal: Callable[..., bool]
) -> None:
    sim, mixed = FIRST.world(world, tiny_model), FIRST.mixed(align=True, strength=3.0)
    server = mixed.start(sim.fleet, 0)
    for absent in ("c", "ab"):
        engine = sim.engine(mixed)
        context = sim.context(engine)
        some = replace(context, cohort=[one for one in context.cohort if one.tier not in absent])
        made = mixed.round(server, some)
        still, moving = ("1:", "0:") if absent == "c" else ("0:", "1:")
        assert all(parcels_equal({"": made[n]}, {"": server[n]}) for n in server if n.startswith(still))
        assert not all(parcels_equal({"": made[n]}, {"": server[n]}) for n in server if n.startswith(moving))


def test_mixed_traffic_counts_all_parts(world: Callable[..., Any], tiny_model: Build) -> None:
    sim = FIRST.world(world, tiny_model)
    mixed, free = FIRST.mixed(align=True, strength=3.0), FIRST.mixed()
    turns = [sim.context(sim.engine(one)) for one in (mixed, free)]
    for one, context in zip((mixed, free), turns, strict=True):
        one.round(one.start(sim.fleet, 0), context)
    drawn, plain = (context.traffic for context in turns)
    assert (plain.asked, drawn.asked) == (6, 8)  # two devices with their own models are asked for kernels
    public, features, kernel = 8 * 36 + 4, 8 * 3 * 4, 8 * 8 * 4
    assert drawn.bytes_up - plain.bytes_up == 2 * features
    assert drawn.bytes_down - plain.bytes_down == 2 * public + 2 * (public + kernel)


def test_mixed_from_settings_builds_parts() -> None:
    table = {
        "strength": 0.25,
        "parts": [
            {"tiers": ["a", "b"], "method": "heterofl", "weighting": "examples"},
            {"tiers": ["c"], "method": "fedhenn", "align": True, "strength": 0.125},
        ],
    }
    assert METHODS["mixed"].from_settings(table, METHODS) == Mixed(
        strength=0.25,
        parts=(
            MethodPart(("a", "b"), HeteroFL(weighting="examples")),
            MethodPart(("c",), FedHeNN(strength=0.125), align=True),
        ),
    )


@pytest.mark.parametrize(
    ("strength", "align", "own", "expected"),
    [(0, True, 0, False), (1, False, 0, False), (1, True, 0, True), (0, False, 1, True)],
)
def test_mixed_needs_public_data_if_any_part_aligns(strength: float, align: bool, own: float, expected: bool) -> None:
    parts = (MethodPart(("a",), HeteroFL(), align), MethodPart(("b",), FedHeNN(strength=own)))
    assert Mixed(strength=strength, parts=parts).needs_public_data == expected


@pytest.mark.parametrize("method", [FedSup(), FjORD()], ids=["fedsup", "fjord"])
def test_mixed_part_sees_only_its_tier_models(
    method: Method, world: Callable[..., Any], tiny_model: Build, parcels_equal: Callable[..., bool]
) -> None:
    sim = world(
        models=[(tier, tiny_model("convnet", width=w)) for tier, w in zip("abc", (1, 0.5, 0.25), strict=True)],
        sizes=SIZES,
    )
    mixed = Mixed(strength=0, parts=(MethodPart(("a", "b"), method), MethodPart(("c",), Standalone())))
    both = train_mixed(sim, mixed)
    assert results_equal(part_result(both, 0, sim, mixed.parts[0]), train_alone(sim, mixed.parts[0]), parcels_equal)
