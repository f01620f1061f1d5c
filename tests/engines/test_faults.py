"""Broken replies: each is broken in one way, and the gate sees which."""

from dataclasses import replace

import pytest
import torch

from fedloom.client import Task, like, shaped
from fedloom.engines import refuse
from fedloom.engines.faults import FaultPlan, corrupt
from fedloom.fleet import Device, Reply, Request
from fedloom.footprints import Footprint
from fedloom.methods import METHODS
from fedloom.testing import with_transports
from tests.conftest import inject_faults


@pytest.fixture
def asked(tiny_model):
    task = Task("train", lambda client, inbox: None, {"weights": like("weights"), "seen": shaped(x=((2,), torch.bool))})
    inbox = {"weights": {"a": torch.zeros(3), "b": torch.zeros(2, 2)}}
    device = Device("0", "all", tiny_model("mlp"), Footprint({}))
    sent = {"weights": {"b": torch.ones(2, 2), "a": torch.ones(3)}, "seen": {"x": torch.tensor([True, False])}}
    return task, inbox, Reply(device, 5, sent)


@pytest.mark.parametrize(
    ("how", "code"), [("nan", "NONFINITE"), ("inf", "NONFINITE"), ("huge", "HUGE"), ("shape", "SHAPE")]
)
def test_corrupt_reply_is_refused_with_code(how, code, asked):
    task, inbox, reply = asked
    assert refuse(reply, task, inbox) is None
    refusal = refuse(corrupt(reply, how), task, inbox)
    assert (refusal.device, refusal.code) == ("0", code)
    assert torch.equal(reply.upload["weights"]["a"], torch.ones(3)), "the device's own numbers stay as they are"


@pytest.mark.parametrize("how", ["nan", "inf", "huge", "shape"])
def test_corrupt_reply_without_floats_breaks_shape(how, asked):
    task, inbox, reply = asked
    truths = replace(task, sends={"seen": task.sends["seen"]})
    only = replace(reply, upload={"seen": reply.upload["seen"]})
    assert refuse(corrupt(only, how), truths, inbox).code == "SHAPE"
    assert refuse(corrupt(replace(reply, upload={}), how), replace(task, sends={}), inbox).code == "KEYS"


def test_refuse_values_beyond_limit_are_huge(asked):
    task, inbox, reply = asked
    for value, code in ((1e17, None), (-1e17, None), (1e19, "HUGE"), (-1e19, "HUGE")):
        weights = {**reply.upload["weights"], "a": torch.tensor([0.0, value, 0.0])}
        refusal = refuse(replace(reply, upload={**reply.upload, "weights": weights}), task, inbox)
        assert (refusal.code if refusal else None) == code


def test_fault_injector_late_device_is_lost_for_round(world):
    """Two questions in one round: who is late with the first is not heard with the second, and told of once."""
    method = METHODS["fedavg"]()
    made = world()
    engine, events = made.engine(method), []
    faults = inject_faults(
        engine, FaultPlan(), lambda device, moved, examples: float(device.name == "1") * 2, events.append
    )
    slow = with_transports(engine, faults)
    cohort, weights = made.fleet.eligible_devices(1), method.start(made.fleet, 0)["weights"]
    for repeat in (0, 1):
        inboxes = {device: {"weights": weights} for device in cohort}
        replies = list(slow.ask(Request(method.train, inboxes, 1, repeat, deadline=1.0)))
        faults.responses.note(inboxes, replies)
        assert {reply.device.name for reply in replies} == {"0", "2"}
    assert [(one.device, one.code) for one in events] == [("1", "LATE")]
    assert [device.name for device in faults.responses.answered()] == ["0", "2"]
    assert faults.responses.waited == 1.0


def test_fault_injector_server_tasks_are_unaffected(world):
    method = METHODS["fedavg"]()
    made = world()
    engine = made.engine(method)
    faults = inject_faults(engine, FaultPlan(outages=dict.fromkeys("012", "gone")))
    dead = with_transports(engine, faults)
    weights = method.start(made.fleet, 0)["weights"]
    inboxes = {device.on_server(): {"weights": weights} for device in made.fleet.eligible_devices(1)}
    answers = list(dead.ask(Request(method.train.without_upload("train"), inboxes, 1)))
    assert len(answers) == 3
    assert faults.responses.waited == 0.0
