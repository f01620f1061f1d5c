"""The methods in `examples/` keep the contract, and compute what their papers' boxes say."""

import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.client import Schedule, Sgd
from fedloom.fleet import Reply
from fedloom.methods.standalone import Standalone
from fedloom.testing import METHOD_CHECKS, CheckFailed, ScriptedEngine, TinyWorld, check_method, same_parcel
from fedloom.testing.doubles import committed_states
from fedloom.testing.report import default_dtype

EXAMPLES = Path(__file__).parents[2] / "examples"
Scaffold = runpy.run_path(str(EXAMPLES / "scaffold.py"))["Scaffold"]
FedProto = runpy.run_path(str(EXAMPLES / "fedproto.py"))["FedProto"]

LR = 0.3
LABELS = [[0, 1], [1, 2], [3]]


def world(steps: int = 1, sizes: tuple[int, ...] = (8, 5, 6), labels: Any = None, **changes: Any) -> TinyWorld:
    """Devices that take a few steps of plain SGD, each with all of their examples."""
    plain = {"schedule": Schedule(batch_size=50, epochs=steps), "optimizer": Sgd(LR)}
    return TinyWorld.make("mlp", sizes=sizes, labels=labels, **{**plain, **changes})


def examples_of(world: TinyWorld, device: int) -> tuple[Tensor, Tensor]:
    rows = torch.from_numpy(world.partition.train[device])
    return world.dataset.preparation(world.dataset.train.x[rows]), world.dataset.train.y[rows]


def forward(world: TinyWorld, weights: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and the last layer's inputs of a plain torch module, without fedloom's batching."""
    module, seen = world.fleet.global_model.module(), []
    last = [layer for layer in module.modules() if isinstance(layer, nn.Linear)][-1]
    last.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    outputs: Any = functional_call(module, dict(weights), (x,))
    return getattr(outputs, "logits", outputs), seen[0]


def gradient_of(weights: Any, loss: Any) -> dict[str, Tensor]:
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    return dict(zip(leaves, torch.autograd.grad(loss(leaves), list(leaves.values())), strict=True))


def label_gradient(world: TinyWorld, weights: Any, device: int) -> dict[str, Tensor]:
    x, y = examples_of(world, device)
    return gradient_of(weights, lambda w: nn.functional.cross_entropy(forward(world, w, x)[0], y))


def same_features(*, input_shape: tuple[int, ...], classes: int, width: float = 1.0) -> nn.Module:
    """Narrower inside, but with as many features: models that FedProto can train together."""
    hidden = max(1, round(8 * width))
    head = nn.Linear(6, classes)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, hidden), nn.ReLU(), nn.Linear(hidden, 6), nn.ReLU(), head)


@pytest.mark.parametrize(
    ("method", "model"),
    [(Scaffold, None), pytest.param(FedProto, None, marks=pytest.mark.slow), (FedProto, same_features)],
)
def test_method_of_example_passes_all_checks(method: Any, model: Any) -> None:
    assert check_method(method, model=model).passed == tuple(METHOD_CHECKS)


def test_scaffold_dividing_by_length_of_plan_is_found_by_check() -> None:
    """The mistake that the tutorial shows."""
    code = (EXAMPLES / "scaffold.py").read_text("utf-8")
    assert code.count("per_device(steps, x)") == 1
    names: dict[str, Any] = {"__name__": "mistaken"}
    exec(code.replace("per_device(steps, x)", "len(client.plan)"), names)
    mistaken = names["Scaffold"]()
    with pytest.raises(CheckFailed, match="learns alone") as failed:
        METHOD_CHECKS["check_unequal_steps"](mistaken, TinyWorld.for_method(mistaken, sizes=(8, 8, 5, 9, 9, 7)))
    page = (EXAMPLES.parent / "docs/tutorials/own_method.md").read_text("utf-8")
    assert failed.value.expected in page and failed.value.hint.split(". ")[0] in page


def test_scaffold_one_device_and_one_step_is_sgd() -> None:
    with default_dtype(torch.float64):
        one = world(sizes=(8,))
        server = one.play(Scaffold(), one.engine(Scaffold()), rounds=4)
        expected = Scaffold().start(one.fleet, 0)["weights"]
        for _ in range(4):
            gradient = label_gradient(one, expected, 0)
            last, expected = gradient, {name: w - LR * gradient[name] for name, w in expected.items()}
    for name, weight in expected.items():
        torch.testing.assert_close(server["weights"][name], weight, rtol=0, atol=1e-12)
        torch.testing.assert_close(server["control"][name], last[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("steps", "participation", "global_lr"), [(1, 1.0, 1.0), (3, 1.0, 0.7), (2, 0.6, 1.5)])
def test_scaffold_rounds_equal_algorithm_of_paper(steps: int, participation: float, global_lr: float) -> None:
    """Algorithm 1 with option II, line by line, on vectors of all weights."""
    method, rounds = Scaffold(global_lr=global_lr), 3
    with default_dtype(torch.float64):
        tiny = world(steps, labels=LABELS)
        engine = tiny.engine(method)
        server = tiny.play(method, engine, rounds, participation)
        x = method.start(tiny.fleet, tiny.seed)["weights"]
        c = {name: torch.zeros_like(weight) for name, weight in x.items()}
        c_of = {name: dict(c) for name in map(tiny.fleet.name, range(3))}
        for number in range(1, rounds + 1):
            cohort = [device.name for device in tiny.context(engine, number, participation).cohort]
            changes = []
            for device in cohort:
                y, c_i = x, c_of[device]
                for _ in range(steps):
                    g = label_gradient(tiny, y, int(device))
                    y = {n: y[n] - LR * (g[n] - c_i[n] + c[n]) for n in y}
                new = {n: c_i[n] - c[n] + (x[n] - y[n]) / (steps * LR) for n in y}
                changes.append(({n: y[n] - x[n] for n in y}, {n: new[n] - c_i[n] for n in y}))
                c_of[device] = new
            size = len(cohort)
            x = {n: x[n] + global_lr * sum(dy[n] for dy, _ in changes) / size for n in x}
            c = {n: c[n] + size / 3 * sum(dc[n] for _, dc in changes) / size for n in x}
    for n in x:
        torch.testing.assert_close(server["weights"][n], x[n], rtol=0, atol=1e-12)
        torch.testing.assert_close(server["control"][n], c[n], rtol=0, atol=1e-12)
    for device, state in committed_states(engine).items():
        for n, value in state["control"].items():
            torch.testing.assert_close(value, c_of[device][n], rtol=0, atol=1e-12)


@pytest.mark.parametrize("model", ["convnet", same_features])
def test_fedproto_without_pull_is_standalone_bit_for_bit(model: Any) -> None:
    tiny = TinyWorld.make(model, widths=(1.0,) if model == "convnet" else (1.0, 0.5), sizes=(8, 5, 8, 9), labels=None)
    states = []
    for method in (FedProto(pull=0.0), Standalone()):
        engine = tiny.engine(method)
        tiny.play(method, engine, rounds=3)
        states.append(committed_states(engine))
    assert states[0].keys() == states[1].keys() and len(states[0]) == 4
    assert all(same_parcel(states[0][name], states[1][name]) for name in states[0])


def fedproto_loss(
    world: TinyWorld, weights: Any, x: Tensor, y: Tensor, known: dict[int, Tensor], pull: float
) -> Tensor:
    logits, features = forward(world, weights, x)
    loss = nn.functional.cross_entropy(logits, y)
    for feature, label in zip(features, y.tolist(), strict=True):
        if label in known:
            loss = loss + pull / len(y) * (feature - known[label]).pow(2).mean()
    return loss


def test_fedproto_round_equals_equations_of_paper() -> None:
    """A step on both losses, then the mean features of each class, and their mean weighted by counts."""
    method = FedProto(pull=2.0)
    with default_dtype(torch.float64):
        tiny = world(labels=LABELS)
        engine = tiny.engine(method)
        server = method.start(tiny.fleet, tiny.seed)
        weights = {name: tiny.fleet.global_model.initial_weights(tiny.seed) for name in ("0", "1", "2")}
        known: dict[int, Tensor] = {}
        for number in (1, 2):
            server = method.round(server, tiny.context(engine, number))
            engine.commit(number)
            found: dict[int, list[Tensor]] = {}
            for name in weights:
                x, y = examples_of(tiny, int(name))

                gradient = gradient_of(weights[name], partial(fedproto_loss, tiny, x=x, y=y, known=known, pull=2.0))
                weights[name] = {n: w - LR * gradient[n] for n, w in weights[name].items()}
                for feature, label in zip(forward(tiny, weights[name], x)[1], y, strict=True):
                    found.setdefault(int(label), []).append(feature)
            known = {label: torch.stack(features).mean(0) for label, features in found.items()}
    assert set(known) == {0, 1, 2, 3}
    for label, prototype in known.items():
        torch.testing.assert_close(server["prototypes"]["mean"][label], prototype, rtol=0, atol=1e-12)
        assert server["prototypes"]["count"][label] == len(found[label])
    for name, state in committed_states(engine).items():
        for n, weight in state["weights"].items():
            torch.testing.assert_close(weight, weights[name][n], rtol=0, atol=1e-12)


def test_fedproto_server_weighs_by_counts_and_keeps_absent_classes() -> None:
    tiny = world(sizes=(8, 8))
    width = tiny.fleet.global_model.feature_width()

    def reply(device: Any, inbox: Any) -> Reply:
        counts = torch.tensor([[3.0, 1.0, 0.0, 0.0], [1.0, 0.0, 2.0, 0.0]][int(device.name)])
        mean = torch.full((4, width), 4.0 if device.name == "0" else 8.0)
        return Reply(device, 8, {"prototypes": {"mean": mean, "count": counts}})

    old = {"mean": torch.full((4, width), -1.0), "count": torch.tensor([0.0, 0.0, 0.0, 7.0])}
    new = FedProto().round({"prototypes": old}, tiny.context(ScriptedEngine(reply)))["prototypes"]
    assert new["mean"][:, 0].tolist() == [5.0, 4.0, 8.0, -1.0]
    assert new["count"].tolist() == [4.0, 1.0, 2.0, 7.0]


def test_fedproto_features_of_two_lengths_are_refused() -> None:
    problem = FedProto().check_fleet(TinyWorld.make("mlp", widths=(1.0, 0.5)).fleet)
    assert problem is not None and "the same length" in problem
