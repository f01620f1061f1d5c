"""`check_method` works: a method from outside the package passes, and each mistake is found by the check for it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch

from fedloom.client import ClientResult, distance, fit, label_loss, like, on_device
from fedloom.fleet import DeviceModel, Fleet, Reply, RoundContext, ServerModel
from fedloom.footprints import ClientUpdate
from fedloom.methods import Method, MethodInfo
from fedloom.methods.standalone import Standalone
from fedloom.tensors import Parcel, combine
from fedloom.testing import METHOD_CHECKS, CheckFailed, ScriptedEngine, TinyWorld, check_method

UPLOADS = {"weights": like("weights")}


@dataclass(frozen=True)
class Outside(Method):
    """HeteroFL in a few lines: a method as a user would write it, in pieces that the broken ones below replace."""

    info = MethodInfo(paper="none", uploads="weights")

    pace: float = 1.0

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        return self.merge(server, context, context.ask(self.train, self.inboxes(server, context.cohort)))

    def inboxes(self, server: Parcel, devices: Iterable[Any]) -> dict[Any, Parcel]:
        return {device: {"weights": device.footprint.read(server["weights"])} for device in devices}

    def merge(self, server: Parcel, context: RoundContext, replies: list[Reply]) -> Parcel:
        updates = [ClientUpdate(r.device.footprint, r.upload["weights"], r.examples) for r in replies]
        mean = context.aggregate(server["weights"], updates)
        return {"weights": combine(lambda old, new: old + self.pace * (new - old), server["weights"], mean)}

    @on_device(sends=UPLOADS)
    def train(self, client: Any, inbox: Parcel) -> ClientResult:
        return ClientResult(upload=self.trained(client, inbox))

    def trained(self, client: Any, inbox: Parcel) -> Parcel:
        return {"weights": fit(client, inbox["weights"], label_loss(client))}


@dataclass(frozen=True)
class Anchored(Outside):
    """One with a required setting, whose devices keep a model of their own near the global one."""

    info = MethodInfo(paper="none", uploads="weights", client_state="its model", produces="personalized")

    strength: float = field(kw_only=True)

    def init_client(self, device: Any, seed: int, warm_start: Any = None) -> Parcel:
        return {"own": device.model.initial_weights(seed)}

    @on_device(sends=UPLOADS)
    def train(self, client: Any, inbox: Parcel) -> ClientResult:
        plain = label_loss(client)

        def loss(weights: Any, batch: Any) -> torch.Tensor:
            return plain(weights, batch) + self.strength * distance(weights, inbox["weights"])

        own = fit(client, client.state["own"], loss)
        return ClientResult(upload=self.trained(client, inbox), state={"own": own})

    def load_own(self, client: Any, inbox: Parcel) -> Any:
        return client.model, client.state["own"]

    def eval_targets(self, server: Parcel) -> Any:
        return {"own": DeviceModel(self.load_own)}

    def check_fleet(self, fleet: Fleet) -> str | None:
        return None if fleet.assignment == "fixed" else "devices keep their model, so their tier must be fixed"


def test_check_method_of_outside_method_passes() -> None:
    report = check_method(Outside, settings={"pace": 0.9})
    assert report.passed == tuple(METHOD_CHECKS)
    assert repr(report).startswith(f"Outside on convnet: {len(METHOD_CHECKS)} checks passed\n  declaration, start, ")
    assert report.notes["check_fleets"] == "refuses two families"


def test_check_method_of_instance_with_states_and_own_model_passes() -> None:
    def net(*, input_shape: tuple[int, ...], classes: int, width: float = 1.0) -> torch.nn.Module:
        hidden = max(2, int(6 * width))
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, hidden), torch.nn.Linear(hidden, classes))

    report = check_method(Anchored(strength=0.1), model=net)
    assert report.passed == tuple(METHOD_CHECKS)
    assert report.notes["check_redrawn_tiers"].startswith("refused: devices keep their model")


@pytest.mark.parametrize("family", ["convnet", "mlp"])
def test_check_learning_of_personal_models_looks_at_own_examples(family: str) -> None:
    """With two of four classes a device gets worse on the whole test set, and that is what it is meant to."""
    labels = ((0, 1), (1, 2), (0, 1, 2, 3), (3,), (0, 2), (1, 3))
    world = TinyWorld.for_method(Standalone(), family, sizes=(8, 8, 5, 9, 9, 7), labels=labels)
    METHOD_CHECKS["check_learning"](Standalone(), world)


def test_check_method_missing_setting_says_so() -> None:
    with pytest.raises(CheckFailed, match="strength") as failed:
        check_method(Anchored)
    assert failed.value.check == "check_declaration"
    assert "settings" in failed.value.hint


BROKEN: list[tuple[str, str, Callable[[], Any]]] = []
"""(the check that finds it, a part of the message, the method)"""


def broken(check: str, message: str, **settings: Any) -> Callable[[type], type]:
    """A mistake: the class below becomes a frozen dataclass that the check must refuse with this message."""

    def note(kind: type) -> type:
        made = dataclass(frozen=True)(kind)
        BROKEN.append((check, message, lambda: made(**settings)))
        return made

    return note


BROKEN.append(("check_declaration", "can be hashed", lambda: Outside([0.5])))  # type: ignore[arg-type]


@broken("check_declaration", "info = MethodInfo")
class WithoutInfo(Outside):
    info = {"paper": "none"}  # type: ignore[assignment]  # noqa: RUF012


@broken("check_start", "whatever the global generators")
class RandomStart(Outside):
    def start(self, fleet: Fleet, seed: int, warm_start: Any = None) -> Parcel:
        return {"weights": combine(torch.rand_like, fleet.global_model.initial_weights(seed))}


@broken("check_start", "start returns a parcel")
class FlatState(Outside):
    def start(self, fleet: Fleet, seed: int, warm_start: Any = None) -> Any:
        return fleet.global_model.initial_weights(seed)


@broken("check_warm_start", "weights of warm_start")
class ColdStart(Outside):
    def start(self, fleet: Fleet, seed: int, warm_start: Any = None) -> Parcel:
        return {"weights": fleet.global_model.initial_weights(seed)}


@broken("check_warm_start", "is only in one of them", strength=0.1)
class KeepsTheGlobalModel(Anchored):
    def init_client(self, device: Any, seed: int, warm_start: Any = None) -> Parcel:
        return {"own": warm_start or device.model.initial_weights(seed)}


@broken("check_inputs_unchanged", "changes its inbox: bundle 'weights'")
class ChangesInbox(Outside):
    def trained(self, client: Any, inbox: Parcel) -> Parcel:
        weights = fit(client, inbox["weights"], label_loss(client))
        for name, weight in inbox["weights"].items():
            weight += 0.5 * (weights[name] - weight)
        return {"weights": inbox["weights"]}


@broken("check_inputs_unchanged", "round leaves the server state")
class ChangesServer(Outside):
    def merge(self, server: Parcel, context: RoundContext, replies: list[Reply]) -> Parcel:
        for name, weight in super().merge(server, context, replies)["weights"].items():
            server["weights"][name].copy_(weight)
        return server


@broken("check_uploads", "KEYS, bundles ['count', 'weights'] where ['weights'] were declared")
class UndeclaredBundle(Outside):
    def trained(self, client: Any, inbox: Parcel) -> Parcel:
        count = torch.ones(len(client.seen_labels), 1)
        return {**super().trained(client, inbox), "count": {"examples": count}}


@broken("check_uploads", "1 requests with devices, 2 without")
class AsksByValue(Outside):
    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        replies = context.ask(self.train, self.inboxes(server, context.cohort))
        if not any(bool(w.any()) for reply in replies for w in reply.upload["weights"].values()):
            replies = context.ask(self.train, self.inboxes(server, context.cohort))
        return self.merge(server, context, replies)


@broken("check_traffic", "as planned")
class SendsByValue(Outside):
    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        inboxes = self.inboxes(server, context.cohort)
        replies = context.ask(self.train, inboxes)
        trained = any(bool(w.any()) for reply in replies for w in reply.upload["weights"].values())
        extra = {"extra": {"more": torch.zeros(9)}} if trained else {}
        return self.merge(server, context, context.ask(self.train, {d: {**i, **extra} for d, i in inboxes.items()}))


@broken("check_task_lookup", "method.find")
class InnerFunction(Outside):
    info = MethodInfo(uploads="weights", produces="personalized")

    def eval_targets(self, server: Parcel) -> Any:
        return {"own": DeviceModel(lambda client, inbox: (client.model, inbox["weights"]), inbox=self.inbox_of(server))}

    def inbox_of(self, server: Parcel) -> Callable[[Any], Parcel]:
        return lambda device: {"weights": device.footprint.read(server["weights"])}


@broken("check_repeated_run", "same seed give the same bits")
class GlobalNoise(Outside):
    def trained(self, client: Any, inbox: Parcel) -> Parcel:
        weights = super().trained(client, inbox)["weights"]
        return {"weights": combine(lambda weight: weight + 0.01 * torch.randn_like(weight), weights)}


@broken("check_reply_order", "every order of replies")
class FirstReplyWins(Outside):
    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        from fedloom.fleet import Request

        request = Request(self.train, self.inboxes(server, context.cohort), context.number)
        return self.merge(server, context, list(context.engine.ask(request))[:1])


@broken("check_missing_replies", "server state is finite")
class DividesBySpread(Outside):
    def merge(self, server: Parcel, context: RoundContext, replies: list[Reply]) -> Parcel:
        counts = torch.tensor([float(reply.examples) for reply in replies])
        spread = (counts - counts.mean()).square().sum()  # 0 for a single reply
        return {"weights": combine(lambda w: w * (spread / spread), super().merge(server, context, replies)["weights"])}


@broken("check_no_replies", "ZeroDivisionError")
class DividesByReplies(Outside):
    def merge(self, server: Parcel, context: RoundContext, replies: list[Reply]) -> Parcel:
        share = len(context.cohort) / len(replies)
        return {"weights": combine(lambda w: w * share / share, super().merge(server, context, replies)["weights"])}


@broken("check_no_replies", "IndexError")
class NeedsCohort(Outside):
    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        assert context.cohort[0].model
        return super().round(server, context)


@broken("check_no_replies", "leave the server state as it is")
class Forgets(Outside):
    """Counts the replies of a round, which only shows once there were some."""

    def start(self, fleet: Fleet, seed: int, warm_start: Any = None) -> Parcel:
        return {**super().start(fleet, seed, warm_start), "seen": {"replies": torch.zeros(())}}

    def merge(self, server: Parcel, context: RoundContext, replies: list[Reply]) -> Parcel:
        return {**super().merge(server, context, replies), "seen": {"replies": torch.tensor(float(len(replies)))}}


@broken("check_lost_reply", "a round without that device")
class WeighsByCohort(Outside):
    def merge(self, server: Parcel, context: RoundContext, replies: list[Reply]) -> Parcel:
        new = super().merge(server, context, replies)["weights"]
        size = len(context.cohort)
        return {"weights": combine(lambda old, w: old + (w - old) / size, server["weights"], new)}


@broken("check_cohort_only", "the states of devices", strength=0.1)
class AsksEverybody(Anchored):
    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        return self.merge(
            server, context, context.ask(self.train, self.inboxes(server, context.fleet.devices(context.number)))
        )


@broken("check_serialization", "share")
class SharedMemory(Outside):
    def start(self, fleet: Fleet, seed: int, warm_start: Any = None) -> Parcel:
        made = super().start(fleet, seed, warm_start)
        return {**made, "both": {name: made["weights"][next(iter(made["weights"]))] for name in ("one", "two")}}

    def merge(self, server: Parcel, context: RoundContext, replies: list[Reply]) -> Parcel:
        return {**super().merge(server, context, replies), "both": server["both"]}


SEEN: list[Parcel] = []


@broken("check_resume", "resumed after round 1")
class HiddenState(Outside):
    """What it remembers is in a global variable, which a resumed run does not have."""

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        known = any(server is one for one in SEEN)
        made = super().round(server, context)
        SEEN.append({"weights": combine(lambda weight: weight + 0.1 * known, made["weights"])})
        return SEEN[-1]


@broken("check_blocks_train_alike", "learns what each device learns alone")
class MixesDevices(Outside):
    def trained(self, client: Any, inbox: Parcel) -> Parcel:
        weights = super().trained(client, inbox)["weights"]
        return {"weights": combine(lambda w: (w + w.mean(0, keepdim=True)) / 2, weights)}


@broken("check_blocks_train_alike", "DTYPE")
class SinglePrecision(Outside):
    def trained(self, client: Any, inbox: Parcel) -> Parcel:
        return {"weights": combine(lambda w: w.float(), super().trained(client, inbox)["weights"])}


@broken("check_unequal_steps", "not by len(client.plan)")
class CountsStepsOfBlock(Outside):
    def trained(self, client: Any, inbox: Parcel) -> Parcel:
        new, steps = super().trained(client, inbox)["weights"], len(client.plan)
        return {"weights": combine(lambda old, w: old + (w - old) / steps, inbox["weights"], new)}


@broken("check_blocks_evaluate_alike", "rows from a block", strength=0.1)
class MixesInEvaluation(Anchored):
    def load_own(self, client: Any, inbox: Parcel) -> Any:
        mixed = combine(lambda w: w.mean(0, keepdim=True).expand_as(w).contiguous(), client.state["own"])
        return client.model, mixed


@broken("check_evaluation", "no target covers tier b")
class OneTierOnly(Outside):
    def eval_targets(self, server: Parcel) -> Any:
        return {"server": ServerModel(lambda tier: tier.footprint.read(server["weights"]), tiers=("a",))}


@broken("check_evaluation_changes_nothing", "before and after evaluation")
class ChangesInEvaluation(Outside):
    def eval_targets(self, server: Parcel) -> Any:
        for weight in server["weights"].values():
            weight *= 0.5
        return super().eval_targets(server)


@broken("check_produces", "DeviceModel", strength=0.1)
class WrongProduct(Anchored):
    info = MethodInfo(uploads="weights")


@broken("check_finish", "or neither")
class SilentFinish(Outside):
    def finish(self, server: Parcel, context: RoundContext) -> Parcel:
        return server


@broken("check_training_changes_state", "the largest change is 0")
class LearnsNothing(Outside):
    def merge(self, server: Parcel, context: RoundContext, replies: list[Reply]) -> Parcel:
        return server


@broken("check_learning", "to the worse", pace=-1.0)
class WrongSign(Outside):
    pass


@broken("check_messages", "by messages as in process")
class OrderOfUpload(Outside):
    @on_device(sends={"weights": like("weights"), "again": like("weights")})
    def train(self, client: Any, inbox: Parcel) -> ClientResult:
        weights = self.trained(client, inbox)["weights"]
        return ClientResult(upload={"again": combine(lambda w: w + 1, weights), "weights": weights})

    def merge(self, server: Parcel, context: RoundContext, replies: list[Reply]) -> Parcel:
        updates = [ClientUpdate(r.device.footprint, next(iter(r.upload.values())), 1.0) for r in replies]
        return {"weights": context.aggregate(server["weights"], updates)}


@broken("check_compression", "NONFINITE")
class NeedsExactNumbers(Outside):
    def inboxes(self, server: Parcel, devices: Iterable[Any]) -> dict[Any, Parcel]:
        exact = {"exact": {"number": torch.full((8, 8), 1.001)}}
        return {device: {**inbox, **exact} for device, inbox in super().inboxes(server, devices).items()}

    def trained(self, client: Any, inbox: Parcel) -> Parcel:
        large = (inbox["exact"]["number"] - 1).reciprocal()
        scale = (large / large)[:, 0, 0]
        weights = super().trained(client, inbox)["weights"]
        return {"weights": combine(lambda w: w * scale.view(-1, *[1] * (w.dim() - 1)), weights)}


@broken("check_redrawn_tiers", "fixed_tiers_problem", strength=0.1)
class KeepsModelOfRedrawn(Anchored):
    def check_fleet(self, fleet: Fleet) -> str | None:
        return None


@broken("check_redrawn_tiers", "each device in its tier of the round")
class RemembersTiers(Outside):
    """Asks devices as they were in the first round."""

    def inboxes(self, server: Parcel, devices: Iterable[Any]) -> dict[Any, Parcel]:
        fleet = replace(small_world().fleet, assignment="redrawn")
        return super().inboxes(server, [fleet.device(int(device.name), 1) for device in devices])


@broken("check_fleets", "a fleet of two families is accepted, and fails")
class TakesAnyModel(Outside):
    info = MethodInfo(uploads="weights", heterogeneity="any")


@broken("check_fleets", "a sentence or None")
class RefusesWithoutReason(Outside):
    def check_fleet(self, fleet: Fleet) -> str | None:
        return "no" if len({tier.model for tier in fleet.tiers}) > 1 and fleet.size == 3 else None


@cache
def small_world() -> TinyWorld:
    return TinyWorld.make(widths=(1.0, 0.5), sizes=(8, 8, 5, 9, 9), labels=[[0, 1], [1, 2], [0, 1, 2, 3], [3, 0], [2]])


@pytest.mark.parametrize(("check", "message", "make"), BROKEN, ids=[f"{one[0]}-{n}" for n, one in enumerate(BROKEN)])
def test_broken_method_fails_its_check(check: str, message: str, make: Callable[[], Any]) -> None:
    with pytest.raises(CheckFailed) as failed:
        METHOD_CHECKS[check](make(), small_world())
    assert failed.value.check == check
    assert message in str(failed.value)
    assert failed.value.expected and failed.value.found and failed.value.hint


def test_every_check_is_broken_by_a_method() -> None:
    assert {check for check, *_ in BROKEN} == set(METHOD_CHECKS)


@pytest.mark.parametrize(
    ("check", "method"), [("check_inputs_unchanged", ChangesInbox), ("check_uploads", UndeclaredBundle)]
)
def test_check_method_names_first_failing_check(check: str, method: type[Method]) -> None:
    with pytest.raises(CheckFailed) as failed:
        check_method(method)
    assert failed.value.check == check
    lines = str(failed.value).splitlines()
    assert lines[0] == f"{check} failed"
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["expected", "found", "hint"]


def test_check_method_error_in_task_names_line_of_user() -> None:
    @dataclass(frozen=True)
    class Scalar(Outside):
        def trained(self, client: Any, inbox: Parcel) -> Parcel:
            plain = label_loss(client)
            return {"weights": fit(client, inbox["weights"], lambda w, b: plain(w, b).sum())}

    with pytest.raises(CheckFailed, match=r"test_checks_of_methods.py:\d+, in trained") as failed:
        check_method(Scalar)
    assert isinstance(failed.value.__cause__, Exception)


def test_check_method_shapes_that_differ_by_tier_hints_at_check_fleet() -> None:
    @dataclass(frozen=True)
    class SameShapes(Outside):
        def merge(self, server: Parcel, context: RoundContext, replies: list[Reply]) -> Parcel:
            mean = combine(lambda *each: sum(each) / len(each), *(r.upload["weights"] for r in replies))
            return {"weights": mean}

    with pytest.raises(CheckFailed, match="size of tensor") as failed:
        check_method(SameShapes)
    assert "check_fleet" in failed.value.hint


def test_check_method_class_that_is_not_a_dataclass_is_refused() -> None:
    class Plain(Method):
        def round(self, server: Parcel, context: RoundContext) -> Parcel:
            return server

    with pytest.raises(CheckFailed, match=r"@dataclass\(frozen=True\)"):
        check_method(Plain)


def test_scripted_engine_keeps_what_was_asked() -> None:
    world, method = TinyWorld.make(sizes=(8, 5)), Outside()
    engine = ScriptedEngine(
        lambda device, inbox: Reply(device, 3, {"weights": combine(torch.zeros_like, inbox["weights"])})
    )
    server = world.play(method, engine, rounds=2)
    assert engine.committed == [1, 2]
    assert [name for name, _ in engine.asked] == ["train", "train"]
    assert not any(bool(weight.any()) for weight in server["weights"].values())
