"""New parts from outside the package: a fault, a metric and an engine, each as a user would add them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedloom.evaluation.metrics import DEFAULT_METRICS, Metric, metric_sign
from fedloom.fleet import Engine, Exchange, Reply, Request
from fedloom.methods.heterofl import HeteroFL
from fedloom.tensors import fingerprint
from fedloom.testing import with_transports


@dataclass(frozen=True)
class StaleWeights:
    """A fault: some devices send back what they received, as if they had not trained."""

    names: frozenset[str]
    side: Literal["network"] = "network"

    def open(self, request: Request) -> Exchange:
        return _StaleExchange(self.names, request)


@dataclass
class _StaleExchange(Exchange):
    names: frozenset[str]
    request: Request

    def upload(self, reply: Reply) -> Reply | None:
        if reply.device.name not in self.names:
            return reply
        return replace(reply, upload={**reply.upload, "weights": self.request.inboxes[reply.device]["weights"]})


def test_new_fault_as_transport_reaches_the_method(world: Callable[..., Any]) -> None:
    place, method = world(sizes=(8, 8)), HeteroFL()
    start = method.start(place.fleet, 0)
    engine = with_transports(place.engine(method), StaleWeights(frozenset({"0", "1"})))
    server = method.round(start, place.context(engine))
    assert fingerprint(server) == fingerprint(start)
    trained = method.round(start, place.context(place.engine(method)))
    assert fingerprint(trained) != fingerprint(start)


def mean_recall(logits: Tensor, labels: Tensor) -> float:
    correct = logits.argmax(-1) == labels
    return 100 * float(torch.stack([correct[labels == label].double().mean() for label in labels.unique()]).mean())


def test_new_metric_in_evaluator_writes_rows(world: Callable[..., Any]) -> None:
    place, method = world(sizes=(8, 8)), HeteroFL()
    engine = place.engine(method)
    metric = Metric("mean_recall", mean_recall, higher_is_better=True)
    evaluator = place.evaluator(metrics=(*DEFAULT_METRICS, metric))
    targets = method.eval_targets(place.play(method, engine, rounds=1))
    rows = evaluator.rows(targets, place.fleet, lambda task, boxes: engine.ask(Request(task, boxes, 1)), 1, False)
    found = [row for row in rows if row.metric == "mean_recall"]
    assert [row.test for row in found] == ["global", "local"] and all(0 <= row.value <= 100 for row in found)
    assert {"accuracy", "loss"} <= {row.metric for row in rows}
    assert metric_sign("mean_recall", evaluator.declared_metrics) == 1


@dataclass
class EchoEngine:
    """An engine whose devices send back their inbox; one that knows devices elsewhere would send it there."""

    inner: Engine
    asked: list[int] = field(default_factory=list)

    def ask(self, request: Request) -> Iterator[Reply]:
        self.asked.append(request.round_number)
        labels = {"seen": torch.ones(4, dtype=torch.bool)}
        for device, inbox in request.inboxes.items():
            yield Reply(device, 1, {"weights": inbox["weights"], "labels": labels})

    def commit(self, round_number: int) -> None:
        self.inner.commit(round_number)

    def close(self) -> None:
        self.inner.close()


def test_new_engine_with_ask_runs_a_method(world: Callable[..., Any]) -> None:
    place, method = world(widths=(1.0, 0.5), sizes=(8, 8, 8)), HeteroFL()
    engine: Engine = EchoEngine(place.engine(method))
    server = place.play(method, engine, rounds=2)
    assert fingerprint(server) == fingerprint(method.start(place.fleet, 0))
    assert isinstance(engine, EchoEngine) and engine.asked == [1, 2]
