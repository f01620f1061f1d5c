"""Metrics of personal models over Flower's messages: uploaded predictions and uploaded values, as in process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedloom.engines import InProcess
from fedloom.evaluation.metrics import as_metric
from fedloom.fleet import Request
from fedloom.flower.apps import ClientRuntime, client_app
from fedloom.methods.standalone import Standalone
from fedloom.runs.build import build_task_registry
from tests import in_memory_grid

METRICS = tuple(as_metric(name) for name in ("accuracy", "loss", "f1", "auroc", "recall"))


@pytest.mark.parametrize("devices_compute", [False, True])
def test_engine_metrics_equal_in_process(
    devices_compute: bool, world: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, method = world(sizes=(8, 5, 9), test_sizes=(6, 2, 4), labels=[[0, 1], [1, 2], [0, 3]]), Standalone()
    evaluator = replace(place.evaluator(), metrics=METRICS, devices_compute=devices_compute)
    find_task = build_task_registry(method, evaluator)

    def build_app(name: str, engine: InProcess, world: Any, method: Any, folder: Path) -> Any:
        runtime = ClientRuntime(name, engine, world.fleet, find_task, folder / name)
        return client_app(lambda recipe, config: runtime, lambda config: {"device": name})

    monkeypatch.setattr(in_memory_grid, "build_app", build_app)
    found = []
    for engine in (place.engine(method), in_memory_grid.connect(place, method, tmp_path)):
        targets = method.eval_targets(place.play(method, engine, rounds=1))

        def ask(task: Any, inboxes: Any, engine: Any = engine) -> Any:
            return list(engine.ask(Request(task, inboxes, 1)))

        rows = evaluator.rows(targets, place.fleet, ask, 1, True)
        found.append({replace(row, value=0.0): row.value for row in rows})
    here, there = found
    assert {row.metric for row in here} >= {"accuracy", "loss", "f1", "recall[0]"} and any(row.device for row in here)
    assert there == {row: pytest.approx(value, rel=1e-5) for row, value in here.items()}
    assert place.refusals == []
