"""Updates much longer than those of their like are not admitted, and their devices do not remember."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom
from fedloom.client import Client, ClientResult, Task, like, shaped
from fedloom.engines import NormScreening
from fedloom.engines.norm_screening import KEPT
from fedloom.fleet import Reply, Request
from fedloom.fleet.round_context import update_norm
from fedloom.methods import METHODS
from fedloom.recipe.errors import RecipeError
from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries
from fedloom.runs.build import assemble
from fedloom.runs.folder import read_manifest
from fedloom.runs.recorder import record_rounds
from fedloom.runs.resume import reopen_run
from fedloom.tensors import Parcel

Recipe = Callable[..., dict[str, Any]]


def moved_by(*steps: float) -> Task:
    """A task that moves every weight of a block's first device by the first step, and so on; and remembers."""

    def run(client: Client, inbox: Parcel) -> ClientResult:
        by = torch.tensor(steps)[: len(client.seen_labels)]
        weights = {n: t + by.view(-1, *[1] * (t.dim() - 1)) for n, t in inbox["weights"].items()}
        return ClientResult({"weights": weights}, state={"weights": weights})

    return Task("train", run, {"weights": like("weights")})


def asked(place: Any, engine: Any, number: int, *steps: float) -> list[str]:
    """Who was admitted of as many devices as there are steps."""
    devices = place.fleet.devices(number)[: len(steps)]
    inbox = {"weights": place.fleet.global_model.initial_weights(0)}
    replies = list(engine.ask(Request(moved_by(*steps), dict.fromkeys(devices, inbox), number)))
    engine.commit(number)
    return sorted(reply.device.name for reply in replies)


@pytest.fixture
def place(world: Callable[..., Any]) -> Any:
    return world(sizes=(4, 4, 4, 4))


@dataclass(frozen=True)
class Screened:
    """An engine behind norm screening."""

    engine: Any
    screening: NormScreening

    def ask(self, request: Request) -> Any:
        return self.engine.ask(replace(request, transports=(self.screening,)))

    def commit(self, number: int) -> None:
        self.screening.commit()
        self.engine.commit(number)

    @property
    def client_states(self) -> Any:
        return self.engine.client_states


def engine_of(place: Any, limit: float = 5.0, **known: Any) -> Screened:
    engine = place.engine(METHODS["ditto"]())
    return Screened(engine, NormScreening(limit, report=engine.gate.report, **known))


def test_screening_first_round_compares_within_request(place: Any) -> None:
    engine = engine_of(place)
    assert asked(place, engine, 1, 1.0, 20.0, 1.5, 0.1) == ["0", "2", "3"]
    (refusal,) = place.refusals
    assert (refusal.device, refusal.code) == ("1", "NORM")
    assert "5 times" in refusal.reason
    assert sorted(engine.client_states.committed) == ["0", "2", "3"]  # what it would remember is not kept either


def test_screening_later_rounds_compare_with_history(place: Any) -> None:
    engine = engine_of(place)
    asked(place, engine, 1, 1.0, 1.0, 1.0)
    assert asked(place, engine, 2, 20.0, 20.0, 2.0) == ["2"]  # were it only for this round, the others would pass
    assert asked(place, engine, 3, 20.0) == []
    assert asked(place, engine, 4, 4.9) == ["0"]


def test_screening_two_devices_refuses_longer(place: Any) -> None:
    assert asked(place, engine_of(place), 1, 1e9, 1.0) == ["1"]


def test_screening_zero_median_refuses_none(place: Any) -> None:
    assert asked(place, engine_of(place), 1, 0.0, 0.0, 3.0) == ["0", "1", "2"]


def test_engine_without_screening_admits_all(place: Any) -> None:
    assert asked(place, place.engine(METHODS["ditto"]()), 1, 1.0, 20.0, 1.0) == ["0", "1", "2"]


def test_update_norm_covers_mirrored_bundles_only(place: Any) -> None:
    device = place.fleet.devices(1)[0]
    given = {"weights": {"a": torch.zeros(2, 2)}, "other": {"b": torch.zeros(3)}}
    sent = {"weights": {"a": torch.full((2, 2), 3.0)}, "other": {"c": torch.ones(3)}, "new": {"d": torch.ones(9)}}
    assert update_norm(Reply(device, 1, sent), given) == 6.0
    assert update_norm(Reply(device, 1, {"new": sent["new"]}), given) is None
    assert update_norm(Reply(device, 1, {"weights": {}}), {"weights": {}}) is None
    assert update_norm(Reply(device.on_server(), 0, sent), given) is None


def test_screening_task_without_update_is_ignored(place: Any) -> None:
    def run(client: Client, inbox: Parcel) -> ClientResult:
        return ClientResult({"told": {"x": torch.tensor([[1.0], [1e9], [1.0]])}})

    engine = engine_of(place)
    task = Task("tell", run, {"told": shaped(x=((1,), torch.float32))})
    replies = list(engine.ask(Request(task, {device: {} for device in place.fleet.devices(1)[:3]}, 1)))
    assert len(replies) == 3


def test_screening_history_is_json_and_bounded(place: Any) -> None:
    known: dict[str, list[float]] = {}
    engine = engine_of(place, history=lambda: known)
    asked(place, engine, 1, 1.0, 2.0, 3.0)
    assert json.loads(json.dumps(known)) == known
    (kind,) = known
    assert kind == "a train"
    assert known[kind] == pytest.approx([known[kind][0] * k for k in (1, 2, 3)], rel=1e-4)  # in order of device
    known[kind] *= 1000
    asked(place, engine, 2, 1.0)
    assert len(known[kind]) == KEPT


def test_screening_tiers_are_compared_separately(world: Callable[..., Any]) -> None:
    place = world(widths=(1.0, 0.5), sizes=(4, 4, 4, 4))
    engine = engine_of(place)
    devices = place.fleet.devices(1)
    inboxes = {one: {"weights": one.footprint.read(place.fleet.global_model.initial_weights(0))} for one in devices}
    steps = {"a": (1.0, 1.0), "b": (90.0, 90.0)}

    def run(client: Client, inbox: Parcel) -> ClientResult:
        tier = next(one.tier for one in devices if one.model == client.model)
        return moved_by(*steps[tier]).run(client, inbox)

    task = replace(moved_by(), run=run)
    assert len(list(engine.ask(Request(task, inboxes, 1)))) == 4


@pytest.mark.slow
def test_run_with_screening_resumed_gives_same_bits(recipe: Recipe, tmp_path: Path) -> None:
    document = recipe(admission={"norm": 1.02, "quarantine": 2}, rounds=5)
    for folder, workers in (("one", 1), ("two", 2)):
        fedloom.run(document, out=tmp_path / folder, workers=workers)
    events = (tmp_path / "one/events.jsonl").read_text()
    assert '"NORM"' in events and '"QUARANTINE"' in events
    left = record_rounds(assemble(load(document, Registries()), Registries(), tmp_path), tmp_path / "left")
    for _ in range(3):
        next(left)
    left.close()  # type: ignore[attr-defined]
    again, since = reopen_run(tmp_path / "left", Registries(), tmp_path, 1)
    assert [done.number for done in record_rounds(again, tmp_path / "left", since)] == [4, 5]
    for other in ("two", "left"):
        assert (tmp_path / other / "events.jsonl").read_text() == events
        assert read_manifest(tmp_path / other)["sha256"] == read_manifest(tmp_path / "one")["sha256"]


def test_run_device_refused_repeatedly_is_quarantined(recipe: Recipe, tmp_path: Path) -> None:
    broken = recipe(
        faults={"corrupt": {"devices": 1, "how": "nan"}}, admission={"quarantine": 3}, rounds=6, evaluation={"every": 6}
    )
    fedloom.run(broken, out=tmp_path / "run")
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [(one["round"], one["code"]) for one in events] == [
        (1, "NONFINITE"), (2, "NONFINITE"), (3, "NONFINITE"), (3, "QUARANTINE"),
    ]  # fmt: skip
    assert len({one["device"] for one in events}) == 1
    assert all(one["reason"] for one in events)


def test_recipe_screening_with_dp_is_refused(recipe: Recipe) -> None:
    with pytest.raises(RecipeError, match=r"admission\.norm"):
        load(recipe(admission={"norm": 5.0}, privacy={"clip": 1.0, "noise": 1.0}), Registries())
