"""A real fleet before there is one: its folder, its keys, which device is which, and which tier it is given."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cryptography")

from fedloom.deploy import processes
from fedloom.deploy.keys import is_loopback
from fedloom.deploy.pidfile import hold_pidfile, read_pidfile, read_running, read_status
from fedloom.deploy.registry import read_bundle, read_fleet_registry, revoke
from fedloom.deploy.runtime import build_runtime, describe_device
from fedloom.deploy.server import ServerSupervisor, SupervisionError, report_launch
from fedloom.deploy.tier_assignment import (
    assign_tiers,
    choose_tiers,
    identify_by_key,
    parse_machine,
    read_rejected_connections,
)
from fedloom.recipe.errors import RecipeError
from fedloom.recipe.load import load
from fedloom.recipe.registry import Registry
from fedloom.runs.build import assemble
from fedloom.runs.faults import NoQuorum
from fedloom.runs.state import RunState
from tests.real_fleet import enroll_fleet

SIZES = ("large", "medium", "small")


def document(**more: Any) -> dict[str, Any]:
    return {
        "rounds": 1,
        "data": {"dataset": "digits", "devices": 3, "max_examples": 20},
        "model": {"family": "mlp", "hidden": [8]},
        "tiers": [
            {"name": "large", "share": 0.4},
            {"name": "medium", "share": 0.3, "width": 0.5},
            {"name": "small", "share": 0.3, "width": 0.25},
        ],
        "method": {"name": "heterofl"},
        **more,
    }  # fmt: skip


def test_a_fleet_is_made_once_and_grows(tmp_path: Path) -> None:
    first = enroll_fleet(tmp_path, "server.example:8443", "gate-1:large")
    again = enroll_fleet(tmp_path, None, "sensor.2")
    assert again.devices[0] == first.devices[0] and again == read_fleet_registry(tmp_path)
    assert [(one.name, one.max_tier) for one in again.devices] == [("gate-1", "large"), ("sensor.2", None)]
    for name in ("ca.key", "server.key", "devices/gate-1/key"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600, name
    bundle = read_bundle(tmp_path / "devices" / "sensor.2")
    assert (bundle.index, bundle.server, bundle.secure) == (1, "server.example:8443", True)
    assert (bundle.folder / "ca.crt").read_bytes() == (tmp_path / "ca.crt").read_bytes()


def test_a_server_that_moves_keeps_its_authority(tmp_path: Path) -> None:
    enroll_fleet(tmp_path, "a.example:1", "one")
    before = {name: (tmp_path / name).read_bytes() for name in ("ca.crt", "server.crt")}
    enroll_fleet(tmp_path, "b.example:1")
    assert (tmp_path / "ca.crt").read_bytes() == before["ca.crt"]
    assert (tmp_path / "server.crt").read_bytes() != before["server.crt"]
    assert read_bundle(tmp_path / "devices" / "one").server == "b.example:1"


def test_a_revoked_key_is_none_of_the_fleets(tmp_path: Path) -> None:
    book = revoke(enroll_fleet(tmp_path, "a.example:1", "a", "b"), ["a"])
    assert [(one.name, bool(one.key)) for one in read_fleet_registry(tmp_path).devices] == [("a", False), ("b", True)]
    with pytest.raises(RecipeError, match="no device c"):
        revoke(book, ["c"])


def test_a_device_may_bring_its_own_key(tmp_path: Path) -> None:
    other = enroll_fleet(tmp_path / "other", "a.example:1", "x")
    public = tmp_path / "x.pub"
    public.write_text(other.devices[0].key + " x@there\n", encoding="utf-8")
    book = enroll_fleet(tmp_path / "fleet", "a.example:1", f"x:small={public}")
    assert book.devices[0].key == other.devices[0].key
    assert not (tmp_path / "fleet" / "devices" / "x" / "key").exists()


@pytest.mark.parametrize(
    ("server", "devices", "secure", "code"),
    [
        ("nowhere", [], True, "ADDRESS"),
        ("example.org:1", [], False, "INSECURE"),
        ("a.example:1", ["x", "x"], True, "DEVICE_NAME"),
        ("a.example:1", ["../x"], True, "DEVICE_NAME"),
        (None, [], True, "ADDRESS"),
    ],
)
def test_what_cannot_be_a_fleet(
    tmp_path: Path, server: str | None, devices: list[str], secure: bool, code: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        enroll_fleet(tmp_path / "fleet", server, *devices, secure=secure)
    assert caught.value.issues[0].code == code


def test_loopback_alone_needs_no_keys(tmp_path: Path) -> None:
    book = enroll_fleet(tmp_path, "127.0.0.1:1", "x", secure=False)
    assert book.devices[0].key == "" and not (tmp_path / "ca.crt").exists()
    assert [is_loopback(one) for one in ("localhost", "127.0.0.1", "::1", "10.0.0.1", "a.example")] == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_a_node_is_the_device_its_key_is_for(tmp_path: Path) -> None:
    book = enroll_fleet(tmp_path, "a.example:1", "a", "b", "c").with_nodes({"a": 10, "b": 11, "c": 12})
    fleet = assemble(load(document(), Registry()), Registry(), tmp_path).fleet
    place = identify_by_key(book, fleet)
    assert place(11, {"index": 1}) == "1"
    liar, stranger = place(11, {"index": 0}), place(99, {"index": 0})
    assert (liar.device, liar.code) == ("1", "OTHER_DEVICE")  # type: ignore[union-attr]
    assert (stranger.device, stranger.code) == ("", "UNREGISTERED")  # type: ignore[union-attr]


def test_the_largest_tier_that_fits_and_is_allowed() -> None:
    caps, fits = ["large", "small", None, None, "medium"], ["medium", "large", "large", None, "small"]
    assert choose_tiers(caps, fits, SIZES) == ("medium", "small", "large", "small", "small")


@given(st.lists(st.tuples(st.sampled_from([None, *SIZES]), st.sampled_from([None, *SIZES])), min_size=1))
def test_nobody_is_given_more_than_fits_or_is_allowed(said: list[tuple[str | None, str | None]]) -> None:
    given_out = choose_tiers([cap for cap, _ in said], [fit for _, fit in said], SIZES)
    for (cap, fit), tier in zip(said, given_out, strict=True):
        assert SIZES.index(tier) >= SIZES.index(cap or "large")
        assert SIZES.index(tier) >= SIZES.index(fit or "small")


def test_tiers_go_into_the_recipe(tmp_path: Path) -> None:
    loaded = load(document(faults={"deadline": 1e9}, engine={"kind": "flower"}), Registry())
    made = assemble(loaded, Registry(), tmp_path)
    book = enroll_fleet(tmp_path / "fleet", "a.example:1", "a:medium", "b", "c")
    said = {"0": {"machine": {"memory": 1e12}}, "1": {"machine": {"memory": 1.0}}}  # the third is not there
    found = assign_tiers(loaded, Registry(), tmp_path, made.fleet, book, said)
    assert found.recipe.fleet.device_tiers == ("medium", "small", "large")
    again = assemble(found, Registry(), tmp_path)
    assert [one.tier for one in again.fleet.devices(1)] == ["medium", "small", "large"]
    assert (
        assign_tiers(found, Registry(), tmp_path, again.fleet, book, {}).recipe.fleet.device_tiers
        == found.recipe.fleet.device_tiers
    )


@pytest.mark.parametrize(
    ("cap", "tiers", "code"), [("huge", (), "TIER_NAME"), ("small", ("large", "small", "small"), "TIER_CAP")]
)
def test_a_recipe_that_keys_do_not_allow(tmp_path: Path, cap: str, tiers: tuple[str, ...], code: str) -> None:
    loaded = load(document(fleet={"device_tiers": list(tiers)}), Registry())
    fleet = assemble(loaded, Registry(), tmp_path).fleet
    book = enroll_fleet(tmp_path / "fleet", "a.example:1", f"a:{cap}", "b", "c")
    with pytest.raises(RecipeError) as caught:
        assign_tiers(loaded, Registry(), tmp_path, fleet, book, {})
    assert caught.value.issues[0].code == code


@pytest.mark.parametrize(
    ("part", "word"),
    [
        ({"device_tiers": ["large"]}, "1 devices are given a tier"),
        ({"device_tiers": ["large"] * 3, "assignment": "redrawn"}, "given and redrawn"),
        ({"device_tiers": ["large", "large", "smal"]}, "no tier of that name"),
    ],
)
def test_given_tiers_that_are_amiss(tmp_path: Path, part: dict[str, Any], word: str) -> None:
    with pytest.raises(RecipeError, match=word):
        assemble(load(document(fleet=part), Registry()), Registry(), tmp_path)


def test_what_a_device_says_amiss_does_not_limit_it() -> None:
    said = {"machine": {"speed": "fast", "memory": -1, "bandwidth": 5.0}, "examples": True}
    found = parse_machine("x", said, None)
    assert (found.speed, found.memory, found.bandwidth, found.examples) == (float("inf"), float("inf"), 5.0, None)
    assert parse_machine("x", {"machine": [1]}, 3.0).deadline == 3.0


def test_knocks_are_told_once_and_again_after_going_back(tmp_path: Path) -> None:
    log, standing = tmp_path / "proxy.jsonl", RunState()
    assert list(read_rejected_connections(log, standing)) == []
    log.write_text('{"code": "TLS", "reason": "one"}\n{"code": "PLAINTEXT", "reason": "two"}\n{"code": "TL', "utf-8")
    assert [one.code for one in read_rejected_connections(log, standing)] == ["TLS", "PLAINTEXT"]
    before = json.loads(json.dumps(standing.as_json()))
    with log.open("a", encoding="utf-8") as file:
        file.write('S", "reason": "three"}\n')
    assert [one.reason for one in read_rejected_connections(log, standing)] == ["three"]
    assert list(read_rejected_connections(log, standing)) == []
    standing.restore(before)
    assert [one.reason for one in read_rejected_connections(log, standing)] == ["three"]


def test_a_device_reads_its_data_by_a_function_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "from fedloom.data import Dataset, Examples\n"
        "from fedloom.data.npz import digits\n"
        "def load():\n"
        "    whole = digits()\n"
        "    few = Examples(whole.train.x[:7], whole.train.y[:7])\n"
        "    return Dataset('mine', few, Examples(whole.test.x[:3], whole.test.y[:3]), 10, whole.preparation)\n",
        encoding="utf-8",
    )
    said = load(
        document(data={"dataset": "digits", "devices": 3, "partition": {"kind": "own"}}, engine={"kind": "flower"}),
        Registry(),
    )
    recipe = json.loads(json.dumps(said.recipe.document()))
    home = build_runtime(recipe, {"device": 1, "load": str(file), "folder": str(tmp_path)})
    assert home.engine.client_data.count(home.fleet.device(1, 1)) == 7


def test_a_device_says_what_it_has_measured(tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text('{"memory": 5.0}', encoding="utf-8")
    assert describe_device({"device": 2, "machine": str(tmp_path / "machine.json")}) == {
        "index": 2,
        "machine": {"memory": 5.0},
    }


class FakeStation:
    """Counts what it is told to begin and to abandon."""

    def __init__(self, home: Path):
        self.folder = home
        self.begun: list[dict[str, str]] = []
        self.left: list[str] = []

    def launch(self, app: Path, config: dict[str, str]) -> str:
        self.begun.append(config)
        return str(len(self.begun))

    def abandon(self, run: str) -> None:
        self.left.append(run)


def supervisor(tmp_path: Path) -> tuple[ServerSupervisor, FakeStation]:
    book = enroll_fleet(tmp_path, "127.0.0.1:1", "a", secure=False)
    return ServerSupervisor(book, tmp_path / "out", {"recipe": "r"}, lambda said: None), FakeStation(tmp_path)


def test_what_ends_without_a_round_more_is_not_begun_for_ever(tmp_path: Path) -> None:
    ours, station = supervisor(tmp_path)
    with pytest.raises(SupervisionError, match="3 times"):
        for _ in range(10):
            ours._start_app(station, tmp_path)  # type: ignore[arg-type]
    assert len(station.begun) == 3 and station.left == ["1", "2"]
    assert len({one["launch"] for one in station.begun}) == 3


def test_what_would_end_again_is_not_begun_again(tmp_path: Path) -> None:
    ours, station = supervisor(tmp_path)
    ours._start_app(station, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(NoQuorum), report_launch(tmp_path, station.begun[0]["launch"]):
        raise NoQuorum(5, 0.5)
    with pytest.raises(SupervisionError, match="5 rounds in a row failed") as caught:
        ours._start_app(station, tmp_path)  # type: ignore[arg-type]
    assert caught.value.too_few_devices and len(station.begun) == 1


def test_a_servers_half_is_known_by_its_launch(tmp_path: Path) -> None:
    ours, station = supervisor(tmp_path)
    assert not ours._is_app_running()
    ours._start_app(station, tmp_path)  # type: ignore[arg-type]
    assert ours._is_app_running()  # it may yet come
    with report_launch(tmp_path, station.begun[0]["launch"]):
        assert ours._is_app_running()
    said = json.loads((tmp_path / "app.json").read_text())
    (tmp_path / "app.json").write_text(json.dumps({**said, "pid": 2**22 + 1}))
    assert not ours._is_app_running()


def test_one_at_a_time_is_on_duty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_running(tmp_path) is None
    with hold_pidfile(tmp_path, run="x"):
        monkeypatch.setattr(processes, "command_line", lambda pid: "somebody else's by now")
        assert read_running(tmp_path) is None
        monkeypatch.setattr(processes, "command_line", lambda pid: "fedloom deploy server")
        found = read_running(tmp_path)
        assert found is not None and found["run"] == "x"
        with pytest.raises(RecipeError, match="already running"), hold_pidfile(tmp_path, run="y"):
            pass
    assert read_pidfile(tmp_path) == {"run": "x", "pid": 0} and read_running(tmp_path) is None


def test_how_a_fleet_is(tmp_path: Path) -> None:
    enroll_fleet(tmp_path, "127.0.0.1:1", "a:small", "b", secure=False)
    assert read_status(tmp_path)["devices"][0] == {"name": "a", "tier": "small", "last_round": None, "refusals": 0}
    assert not read_status(tmp_path / "devices" / "a")["running"]
    run = tmp_path / "run"
    run.mkdir()
    (run / "manifest.json").write_text('{"status": "finished"}')
    (run / "recipe.toml").write_text('[fleet]\ndevice_tiers = ["small", "large"]\n')
    (run / "timings.jsonl").write_text('{"round": 1}\n{"round": 2}\n')
    lines = [
        {"round": 1, "devices": ["0", "1"], "outcome": "admitted"},
        {"round": 2, "devices": ["0"], "outcome": "LATE"},
    ]
    (run / "participation.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (run / "events.jsonl").write_text('{"round": 2, "device": "0", "code": "LATE", "reason": ""}\n')
    with hold_pidfile(tmp_path, run=str(run)):
        pass
    found = read_status(tmp_path)
    assert [(one["tier"], one["last_round"], one["refusals"]) for one in found["devices"]] == [
        ("small", 1, 1),
        ("large", 1, 0),
    ]
    assert "after round 2" in found["summary"] and found["state"] == "finished"
