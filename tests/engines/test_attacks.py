"""Devices that misbehave: each attack does what it says, through the gate, and only where it should."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch

from fedloom.engines import ATTACKS, AttackTransport, malicious, poisoned
from fedloom.fleet import Device, Exchange, Reply, Request
from fedloom.footprints import RULES, RobustAggregator
from fedloom.tensors import Parcel
from fedloom.testing import with_transports

BAD = frozenset({"1", "4"})


@dataclass(frozen=True)
class Reordering:
    """A transport that hands on all replies in another order."""

    change: Callable[[list[Reply]], list[Reply]]
    side: Literal["network"] = "network"

    def open(self, request: Request) -> Exchange:
        change = self.change

        class Reordered(Exchange):
            def gather(self, replies: Iterable[Reply]) -> Iterable[Reply]:
                return change(list(replies))

        return Reordered()


@pytest.fixture
def tiers(world: Callable[..., Any]) -> Any:
    """Six devices: 0 to 2 wide, 3 to 5 narrow; one of each is bad."""
    return world(widths=(1.0, 0.5), sizes=(8,) * 6, test_sizes=(4,) * 6, shares=(0.5, 0.5))


def answers(tiers: Any, method: Any, attack: str | None) -> tuple[dict[str, Reply], dict[str, Parcel]]:
    """What the server gets in a first round, and what it had sent, by device."""
    engine = tiers.engine(method)
    if attack:
        client_data = poisoned(ATTACKS[attack](), engine.client_data, BAD)
        engine = with_transports(
            replace(engine, client_data=client_data), AttackTransport(ATTACKS[attack](), BAD, tiers.fleet)
        )
    whole = method.start(tiers.fleet, 0)["weights"]
    devices = tiers.fleet.devices(1)
    inboxes: dict[Device, Parcel] = {one: {"weights": one.footprint.read(whole)} for one in devices}
    replies = engine.ask(Request(method.train, inboxes, 1))
    return {one.device.name: one for one in replies}, {device.name: box for device, box in inboxes.items()}


@pytest.fixture
def heterofl() -> Any:
    from fedloom.methods import METHODS

    return METHODS["heterofl"]()


@pytest.fixture
def honest(tiers: Any, heterofl: Any) -> dict[str, dict[str, torch.Tensor]]:
    replies, inboxes = answers(tiers, heterofl, None)
    return {name: step(replies[name], inboxes[name]) for name in replies}


def step(reply: Reply, inbox: Parcel) -> dict[str, torch.Tensor]:
    return {name: tensor - inbox["weights"][name] for name, tensor in reply.upload["weights"].items()}


def steps(tiers: Any, method: Any, attack: str) -> dict[str, dict[str, torch.Tensor]]:
    replies, inboxes = answers(tiers, method, attack)
    return {name: step(replies[name], inboxes[name]) for name in replies}


def alike(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], by: float = 1.0) -> bool:
    return all(torch.allclose(left[name], by * right[name], rtol=1e-3, atol=1e-5) for name in right)


@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_honest_devices_send_unchanged_updates(
    attack: str, tiers: Any, heterofl: Any, parcels_equal: Callable[..., bool]
) -> None:
    before, _ = answers(tiers, heterofl, None)
    after, _ = answers(tiers, heterofl, attack)
    for name in before.keys() - BAD:
        if attack == "label_flip":  # blocks are put together anew, so rounding differs
            assert alike(dict(after[name].upload["weights"]), dict(before[name].upload["weights"]))
        else:
            assert parcels_equal(after[name].upload, before[name].upload)
    if attack != "wrong_tier":
        assert after.keys() == before.keys()
        assert any(not parcels_equal(after[name].upload, before[name].upload) for name in BAD)


@pytest.mark.parametrize(("attack", "factor"), [("sign_flip", -5.0), ("scaling", 20.0)])
def test_scaling_update_is_multiplied(attack: str, factor: float, tiers: Any, heterofl: Any, honest: Any) -> None:
    found = steps(tiers, heterofl, attack)
    assert all(alike(found[name], honest[name], factor) for name in BAD)


def test_gaussian_update_is_long_and_unrelated(tiers: Any, heterofl: Any, honest: Any) -> None:
    found = steps(tiers, heterofl, "gaussian")
    for name in BAD:
        noise, update = (torch.cat([one.flatten() for one in side[name].values()]) for side in (found, honest))
        assert 70 < float(noise.norm() / update.norm()) < 140
        assert abs(float(torch.cosine_similarity(noise, update, dim=0))) < 0.3
    again = steps(tiers, heterofl, "gaussian")
    assert all(torch.equal(again["1"][name], found["1"][name]) for name in found["1"])


@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_any_order_of_replies_gives_same_bits(
    attack: str, tiers: Any, heterofl: Any, parcels_equal: Callable[..., bool]
) -> None:
    def turned(replies: list[Reply]) -> list[Reply]:
        return [
            replace(one, upload={bundle: dict(reversed(held.items())) for bundle, held in one.upload.items()})
            for one in reversed(replies)
        ]

    found = []
    for change in (list, turned):
        engine = tiers.engine(heterofl)
        client_data = poisoned(ATTACKS[attack](), engine.client_data, BAD)
        attacker = AttackTransport(ATTACKS[attack](), BAD, tiers.fleet)
        attacked = with_transports(replace(engine, client_data=client_data), attacker, Reordering(change))
        found.append(tiers.play(heterofl, attacked))
    assert parcels_equal(*found)


def test_ipm_update_is_negated_mean_of_tier(tiers: Any, heterofl: Any, honest: Any) -> None:
    found = steps(tiers, heterofl, "ipm")
    for bad, good in (("1", ("0", "2")), ("4", ("3", "5"))):
        mean = {name: (honest[good[0]][name] + honest[good[1]][name]) / 2 for name in honest[bad]}
        assert alike(found[bad], mean, -1.0)


def test_alie_update_is_mean_minus_deviations(tiers: Any, heterofl: Any, honest: Any) -> None:
    found = steps(tiers, heterofl, "alie")
    for name, update in found["1"].items():
        both = torch.stack([honest["0"][name], honest["2"][name]])
        assert torch.allclose(update, both.mean(0) - 1.5 * both.std(0, correction=0), rtol=1e-3, atol=1e-5)


def test_low_coverage_only_weights_of_wide_tier_are_scaled(tiers: Any, heterofl: Any, honest: Any) -> None:
    found = steps(tiers, heterofl, "low_coverage")
    assert alike(found["4"], honest["4"])
    narrow = tiers.fleet.devices(1)[5].footprint
    for name, update in found["1"].items():
        shared = torch.zeros_like(update, dtype=torch.bool)
        shared[narrow.blocks[name]] = True
        factor = torch.where(shared, 1.0, -20.0)
        assert torch.allclose(update, factor * honest["1"][name], rtol=1e-3, atol=1e-4)
    assert any(not alike({name: update}, {name: honest["1"][name]}) for name, update in found["1"].items())


def test_wrong_tier_upload_is_refused(tiers: Any, heterofl: Any) -> None:
    replies, _ = answers(tiers, heterofl, "wrong_tier")
    assert replies.keys() == {"0", "2", "3", "5"}
    assert {(one.device, one.code) for one in tiers.refusals} == {(name, "SHAPE") for name in BAD}


def test_scaling_overflow_is_refused(tiers: Any, heterofl: Any) -> None:
    attacker = AttackTransport(ATTACKS["scaling"](factor=1e38 * 1e3), BAD, tiers.fleet)
    engine = with_transports(tiers.engine(heterofl), attacker)
    tiers.play(heterofl, engine, rounds=1)
    assert {(one.device, one.code) for one in tiers.refusals} == {(name, "NONFINITE") for name in BAD}


def test_label_flip_shared_rows_change_for_attackers_only(tiers: Any, heterofl: Any) -> None:
    held = tiers.engine(heterofl).client_data
    shared = replace(held, train={**held.train, "0": held.train["1"]})
    found = poisoned(ATTACKS["label_flip"](), shared, BAD)

    def labels(client_data: Any, name: str) -> list[int]:
        y: list[int] = client_data.dataset.train.y[client_data.train[name]].tolist()
        return y

    for name in held.train:
        before = labels(shared, name)
        assert labels(found, name) == ([3 - y for y in before] if name in BAD else before)
        assert torch.equal(found.dataset.train.x[found.train[name]], shared.dataset.train.x[shared.train[name]])
    assert len(held.dataset.train) == 48


def test_malicious_same_seed_draws_same_devices(tiers: Any) -> None:
    fleet = replace(tiers.fleet, size=50)
    assert len(malicious(fleet, 0.2)) == 10
    assert malicious(fleet, 0.2) == malicious(fleet, 0.2)
    assert malicious(fleet, 0.2) < malicious(fleet, 0.4)
    assert malicious(fleet, 0.2) != malicious(replace(fleet, seed=1), 0.2)
    assert malicious(fleet, 0.0) == frozenset()


def test_attack_any_method_round_stays_finite(method: Any, world_for: Callable[..., Any]) -> None:
    """Whatever a method sends, its rounds end; the defence is the same for all."""
    tiny = world_for(method, sizes=(8,) * 4)
    names = frozenset({"0", "3"})
    for name, make_attack in ATTACKS.items():
        attack = make_attack()
        engine = tiny.engine(method)
        client_data = poisoned(attack, engine.client_data, names)
        under = with_transports(replace(engine, client_data=client_data), AttackTransport(attack, names, tiny.fleet))
        server = method.start(tiny.fleet, 0)
        context = replace(tiny.context(under), aggregate=RobustAggregator(RULES["default"]()))  # type: ignore[arg-type]
        server = method.round(server, context)
        under.commit(1)
        assert all(bool(torch.isfinite(one).all()) for one in server.get("weights", {}).values()), name
