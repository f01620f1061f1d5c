"""A real fleet without its processes: folder, keys, identification of devices, tier assignment, supervision."""

import datetime
import inspect
import json
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cryptography")
from cryptography import x509

import fedloom
from fedloom.data import DataBroken
from fedloom.deploy import device, keys, processes
from fedloom.deploy.device import DeviceSupervisor, check_server
from fedloom.deploy.keys import CertificateEnd, is_loopback, is_renewed, read_end
from fedloom.deploy.pidfile import hold_pidfile, read_pidfile, read_running, read_status
from fedloom.deploy.proxy import read_rejected_connections
from fedloom.deploy.registry import enroll, parse_enroll_request, read_bundle, read_fleet_registry, renew, revoke
from fedloom.deploy.remote import require_same_version
from fedloom.deploy.runtime import build_runtime, describe_device
from fedloom.deploy.server import ServerSupervisor, SupervisionError, check_certificates, report_launch
from fedloom.deploy.tier_assignment import (
    assign_tiers,
    choose_tiers,
    identify_by_key,
    parse_device_spec,
)
from fedloom.engines import Refusal
from fedloom.recipe.errors import RecipeError
from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries
from fedloom.runs.build import assemble
from fedloom.runs.faults import NoQuorum
from fedloom.runs.state import RunState
from tests.real_fleet import enroll_fleet

SIZES = ("large", "medium", "small")


def build_document(**more: Any) -> dict[str, Any]:
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


def test_enroll_again_keeps_the_fleet_and_adds_devices(tmp_path: Path) -> None:
    first = enroll_fleet(tmp_path, "server.example:8443", "gate-1:large")
    again = enroll_fleet(tmp_path, None, "sensor.2")
    assert again.devices[0] == first.devices[0] and again == read_fleet_registry(tmp_path)
    assert [(device.name, device.max_tier) for device in again.devices] == [("gate-1", "large"), ("sensor.2", None)]
    for name in ("ca.key", "server.key", "devices/gate-1/key"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600, name
    bundle = read_bundle(tmp_path / "devices" / "sensor.2")
    assert (bundle.index, bundle.server, bundle.secure) == (1, "server.example:8443", True)
    assert (bundle.folder / "ca.crt").read_bytes() == (tmp_path / "ca.crt").read_bytes()


def test_enroll_new_address_keeps_the_authority(tmp_path: Path) -> None:
    enroll_fleet(tmp_path, "a.example:1", "one")
    before = {name: (tmp_path / name).read_bytes() for name in ("ca.crt", "server.crt")}
    enroll_fleet(tmp_path, "b.example:1")
    assert (tmp_path / "ca.crt").read_bytes() == before["ca.crt"]
    assert (tmp_path / "server.crt").read_bytes() != before["server.crt"]
    assert read_bundle(tmp_path / "devices" / "one").server == "b.example:1"


def days_left(file: Path) -> int:
    return CertificateEnd(file.name, read_end(file)).days_left


def test_enroll_certificates_are_valid_for_the_stated_time(tmp_path: Path) -> None:
    enroll_fleet(tmp_path / "usual", "a.example:1", "one")
    assert [days_left(tmp_path / "usual" / name) for name in ("server.crt", "ca.crt")] == [364, 5 * 365 - 1]
    enroll(tmp_path / "short", "a.example:1", [], True, valid_days=10)
    assert [days_left(tmp_path / "short" / name) for name in ("server.crt", "ca.crt")] == [9, 49]


def test_renew_new_server_certificate_is_trusted_by_enrolled_devices(tmp_path: Path) -> None:
    registry = enroll(tmp_path, "127.0.0.1:1", [parse_enroll_request("one")], True, valid_days=10)
    names = ("ca.crt", "ca.key", "server.crt", "devices/one/key")
    before = {name: (tmp_path / name).read_bytes() for name in names}
    renew(registry)
    now = {name: (tmp_path / name).read_bytes() for name in names}
    assert [name for name in names if now[name] != before[name]] == ["server.crt"]
    renew(registry, valid_days=100)  # more than the authority has left, so its certificate is renewed too
    assert [days_left(tmp_path / name) for name in ("server.crt", "ca.crt")] == [99, 499]
    assert (tmp_path / "ca.key").read_bytes() == before["ca.key"]
    assert (tmp_path / "devices" / "one" / "ca.crt").read_bytes() == (tmp_path / "ca.crt").read_bytes()
    assert read_fleet_registry(tmp_path).valid_days == 100
    for authority in (before["ca.crt"], (tmp_path / "ca.crt").read_bytes()):  # a device may have either
        signer = x509.load_pem_x509_certificate(authority)
        x509.load_pem_x509_certificate((tmp_path / "server.crt").read_bytes()).verify_directly_issued_by(signer)


def test_renew_insecure_fleet_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no certificates"):
        renew(enroll_fleet(tmp_path, "127.0.0.1:1", secure=False))


@pytest.mark.parametrize("days", [3, 29, 31])
def test_check_certificates_warns_thirty_days_before_the_end(
    tmp_path: Path, days: int, caplog: pytest.LogCaptureFixture
) -> None:
    registry = enroll(tmp_path, "127.0.0.1:1", [parse_enroll_request("one")], True, valid_days=days)
    check_certificates(registry)
    warned = [record.getMessage() for record in caplog.records]
    assert any(text.startswith("the certificate server.crt ends on ") for text in warned) == (days < 31)
    assert all(f"fedloom deploy renew {tmp_path}" in text for text in warned)
    status = {one["file"]: one for one in read_status(tmp_path)["certificates"]}
    assert (status["server.crt"]["days_left"], status["server.crt"]["soon"]) == (days - 1, days < 31)
    (of_device,) = read_status(tmp_path / "devices" / "one")["certificates"]
    assert (of_device["file"], of_device["soon"]) == ("ca.crt", 5 * days - 1 < 30)


def test_check_certificates_after_the_end_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = enroll_fleet(tmp_path, "127.0.0.1:1", "one")
    later = keys._now() + datetime.timedelta(days=366)
    monkeypatch.setattr(keys, "_now", lambda: later)
    with pytest.raises(RecipeError, match=r"CERTIFICATE: the certificate server\.crt ended on .*\n.*deploy renew"):
        check_certificates(registry)
    renew(registry)
    check_certificates(registry)
    monkeypatch.setattr(keys, "_now", lambda: later + datetime.timedelta(days=5 * 366))
    with pytest.raises(RecipeError, match=r"the certificate ca\.crt ended on"):
        check_server(read_bundle(tmp_path / "devices" / "one"))


@pytest.mark.parametrize(("content", "words"), [(None, "is missing"), ("-----BEGIN EC PRIVATE KEY-----", "OpenSSH")])
def test_check_server_unusable_private_key_is_named(tmp_path: Path, content: str | None, words: str) -> None:
    enroll_fleet(tmp_path, "127.0.0.1:1", "one")
    key = tmp_path / "devices" / "one" / "key"
    key.unlink() if content is None else key.write_text(content)
    with pytest.raises(RecipeError, match=words) as caught:
        check_server(read_bundle(key.parent))
    assert caught.value.issues[0].code == "KEY"


def test_is_renewed_needs_the_same_key_and_a_later_end(tmp_path: Path) -> None:
    enroll(tmp_path / "a", "a.example:1", [], True, valid_days=10)
    old = (tmp_path / "a" / "ca.crt").read_bytes()
    renew(read_fleet_registry(tmp_path / "a"), valid_days=20, authority=True)
    new = (tmp_path / "a" / "ca.crt").read_bytes()
    enroll(tmp_path / "b", "a.example:1", [], True, valid_days=40)
    assert is_renewed(old, new)
    assert not is_renewed(new, old)
    assert not is_renewed(old, (tmp_path / "b" / "ca.crt").read_bytes())
    assert not is_renewed(old, b"no certificate")


def test_require_same_version_refuses_other_releases_by_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    identify = require_same_version(lambda node, info: "3")
    major, minor, *_ = fedloom.__version__.split(".")
    assert identify(1, {"fedloom": fedloom.__version__}) == "3" and not caplog.records
    assert identify(1, {"fedloom": f"{major}.{minor}.77"}) == "3"
    assert f"the device has fedloom {major}.{minor}.77, the server {fedloom.__version__}" in caplog.text
    for other in (f"{major}.{int(minor) + 1}.0", f"{int(major) + 1}.{minor}.0", None, "0.2;rm", f"{major}.{minor}7"):
        refusal = identify(1, {"fedloom": other})
        assert isinstance(refusal, Refusal) and (refusal.device, refusal.code) == ("3", "VERSION")
        assert refusal.reason.endswith(f"on the device: pip install 'fedloom[flower]=={major}.{minor}.*'")
    assert require_same_version(lambda node, info: None)(1, {}) is None


def test_revoke_removes_the_key(tmp_path: Path) -> None:
    registry = revoke(enroll_fleet(tmp_path, "a.example:1", "a", "b"), ["a"])
    assert [(device.name, bool(device.key)) for device in read_fleet_registry(tmp_path).devices] == [
        ("a", False),
        ("b", True),
    ]
    with pytest.raises(RecipeError, match="no device c"):
        revoke(registry, ["c"])


def test_enroll_own_public_key_is_registered(tmp_path: Path) -> None:
    other = enroll_fleet(tmp_path / "other", "a.example:1", "x")
    public = tmp_path / "x.pub"
    public.write_text(other.devices[0].key + " x@there\n", encoding="utf-8")
    registry = enroll_fleet(tmp_path / "fleet", "a.example:1", f"x:small={public}")
    assert registry.devices[0].key == other.devices[0].key
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
def test_enroll_invalid_request_raises(
    tmp_path: Path, server: str | None, devices: list[str], secure: bool, code: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        enroll_fleet(tmp_path / "fleet", server, *devices, secure=secure)
    assert caught.value.issues[0].code == code


def test_enroll_insecure_on_loopback_has_no_keys(tmp_path: Path) -> None:
    registry = enroll_fleet(tmp_path, "127.0.0.1:1", "x", secure=False)
    assert registry.devices[0].key == "" and not (tmp_path / "ca.crt").exists()
    assert [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "10.0.0.1", "a.example")] == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_identify_by_key_resolves_nodes_and_refuses_impostors(tmp_path: Path) -> None:
    registry = enroll_fleet(tmp_path, "a.example:1", "a", "b", "c").with_nodes({"a": 10, "b": 11, "c": 12})
    fleet = assemble(load(build_document(), Registries()), Registries(), tmp_path).fleet
    identify = identify_by_key(registry, fleet)
    assert identify(11, {"index": 1}) == "1"
    impostor, stranger = identify(11, {"index": 0}), identify(99, {"index": 0})
    assert (impostor.device, impostor.code) == ("1", "OTHER_DEVICE")  # type: ignore[union-attr]
    assert (stranger.device, stranger.code) == ("", "UNREGISTERED")  # type: ignore[union-attr]


def test_choose_tiers_returns_the_largest_that_fits_and_is_allowed() -> None:
    limits, fits = ["large", "small", None, None, "medium"], ["medium", "large", "large", None, "small"]
    assert choose_tiers(limits, fits, SIZES) == ("medium", "small", "large", "small", "small")


@given(st.lists(st.tuples(st.sampled_from([None, *SIZES]), st.sampled_from([None, *SIZES])), min_size=1))
def test_choose_tiers_never_exceeds_fit_or_limit(devices: list[tuple[str | None, str | None]]) -> None:
    tiers = choose_tiers([limit for limit, _ in devices], [fit for _, fit in devices], SIZES)
    for (limit, fit), tier in zip(devices, tiers, strict=True):
        assert SIZES.index(tier) >= SIZES.index(limit or "large")
        assert SIZES.index(tier) >= SIZES.index(fit or "small")


def test_assign_tiers_writes_the_recipe(tmp_path: Path) -> None:
    loaded = load(build_document(faults={"deadline": 1e9}, engine={"kind": "flower"}), Registries())
    fleet = assemble(loaded, Registries(), tmp_path).fleet
    registry = enroll_fleet(tmp_path / "fleet", "a.example:1", "a:medium", "b", "c")
    reports = {"0": {"machine": {"memory": 1e12}}, "1": {"machine": {"memory": 1.0}}}  # the third is not connected
    assigned = assign_tiers(loaded, Registries(), tmp_path, fleet, registry, reports)
    assert assigned.recipe.fleet.device_tiers == ("medium", "small", "large")
    again = assemble(assigned, Registries(), tmp_path)
    assert [device.tier for device in again.fleet.devices(1)] == ["medium", "small", "large"]
    assert (
        assign_tiers(assigned, Registries(), tmp_path, again.fleet, registry, {}).recipe.fleet.device_tiers
        == assigned.recipe.fleet.device_tiers
    )


@pytest.mark.parametrize(
    ("limit", "tiers", "code"), [("huge", (), "TIER_NAME"), ("small", ("large", "small", "small"), "TIER_CAP")]
)
def test_assign_tiers_above_limit_raises(tmp_path: Path, limit: str, tiers: tuple[str, ...], code: str) -> None:
    loaded = load(build_document(fleet={"device_tiers": list(tiers)}), Registries())
    fleet = assemble(loaded, Registries(), tmp_path).fleet
    registry = enroll_fleet(tmp_path / "fleet", "a.example:1", f"a:{limit}", "b", "c")
    with pytest.raises(RecipeError) as caught:
        assign_tiers(loaded, Registries(), tmp_path, fleet, registry, {})
    assert caught.value.issues[0].code == code


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device_tiers": ["large"]}, "fleet.device_tiers has 1 entry, the recipe"),
        ({"device_tiers": ["large"] * 3, "assignment": "redrawn"}, "given and redrawn"),
        ({"device_tiers": ["large", "large", "smal"]}, "no tier of that name"),
    ],
)
def test_assemble_invalid_device_tiers_raises(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        assemble(load(build_document(fleet=settings), Registries()), Registries(), tmp_path)


def test_parse_device_spec_invalid_values_do_not_limit() -> None:
    report = {"machine": {"speed": "fast", "memory": -1, "bandwidth": 5.0}, "examples": True}
    spec = parse_device_spec("x", report, None)
    assert (spec.speed, spec.memory, spec.bandwidth, spec.examples) == (
        float("inf"),
        float("inf"),
        5.0,
        None,
    )
    assert parse_device_spec("x", {"machine": [1]}, 3.0).deadline == 3.0


def test_read_rejected_connections_restored_state_reads_again(tmp_path: Path) -> None:
    log, state = tmp_path / "proxy.jsonl", RunState()
    assert list(read_rejected_connections(log, state)) == []
    log.write_text('{"code": "TLS", "reason": "one"}\n{"code": "PLAINTEXT", "reason": "two"}\n{"code": "TL', "utf-8")
    assert [refusal.code for refusal in read_rejected_connections(log, state)] == ["TLS", "PLAINTEXT"]
    before = json.loads(json.dumps(state.as_json()))
    with log.open("a", encoding="utf-8") as file:
        file.write('S", "reason": "three"}\n')
    assert [refusal.reason for refusal in read_rejected_connections(log, state)] == ["three"]
    assert list(read_rejected_connections(log, state)) == []
    state.restore(before)
    assert [refusal.reason for refusal in read_rejected_connections(log, state)] == ["three"]


def test_build_runtime_own_load_function_reads_the_data(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "from fedloom.data import Dataset, Examples\n"
        "from fedloom.data.npz import digits\n"
        "def load():\n"
        "    data = digits()\n"
        "    few = Examples(data.train.x[:7], data.train.y[:7])\n"
        "    return Dataset('mine', few, Examples(data.test.x[:3], data.test.y[:3]), 10, data.preparation)\n",
        encoding="utf-8",
    )
    loaded = load(
        build_document(
            data={"dataset": "digits", "devices": 3, "partition": {"kind": "own"}}, engine={"kind": "flower"}
        ),
        Registries(),
    )
    recipe = json.loads(json.dumps(loaded.recipe.document()))
    runtime = build_runtime(recipe, {"device": 1, "load": str(file), "folder": str(tmp_path)})
    assert runtime.engine.client_data.count(runtime.fleet.device(1, 1)) == 7


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return torch.full((9, 1, 8, 8), torch.nan), torch.arange(9) % 3", r"load\(\) returned tuple, not a Dataset"),
        ("return of(torch.full((9, 1, 8, 8), torch.nan))", "576 inputs are not finite .* row 0"),
        ("return of(torch.zeros(9, 1, 8, 8), classes=2)", "labels from 0 to 2"),
        ("return of(torch.zeros(9, 3, 8), Preparation(flip=True))", "flip of a preparation is for images"),
    ],
)
def test_build_runtime_own_data_that_is_broken_is_refused(tmp_path: Path, body: str, message: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "from fedloom.data import Dataset, Examples, Preparation\n"
        "def of(x, preparation=Preparation(), classes=10):\n"
        "    examples = Examples(x, torch.arange(9) % 3)\n"
        "    return Dataset('mine', examples, examples, classes, preparation)\n"
        f"def load():\n    {body}\n",
        encoding="utf-8",
    )
    own = {"dataset": "digits", "devices": 3, "partition": {"kind": "own"}}
    loaded = load(build_document(data=own, engine={"kind": "flower"}), Registries())
    recipe = json.loads(json.dumps(loaded.recipe.document()))
    with pytest.raises(DataBroken, match=message):
        build_runtime(recipe, {"device": 1, "load": str(file), "folder": str(tmp_path)})


def test_describe_device_includes_measurements(tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text('{"memory": 5.0}', encoding="utf-8")
    assert describe_device({"device": 2, "machine": str(tmp_path / "machine.json")}) == {
        "index": 2,
        "fedloom": fedloom.__version__,
        "machine": {"memory": 5.0},
    }


class FakeSuperLink:
    """Records the runs that are launched and abandoned."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.launched: list[dict[str, str]] = []
        self.abandoned: list[str] = []

    def launch(self, app: Path, config: dict[str, str]) -> str:
        self.launched.append(config)
        return str(len(self.launched))

    def abandon(self, run: str) -> None:
        self.abandoned.append(run)


def build_supervisor(tmp_path: Path) -> tuple[ServerSupervisor, FakeSuperLink]:
    registry = enroll_fleet(tmp_path, "127.0.0.1:1", "a", secure=False)
    return ServerSupervisor(registry, tmp_path / "out", {"recipe": "r"}), FakeSuperLink(tmp_path)


def test_server_supervisor_starts_without_progress_give_up(tmp_path: Path) -> None:
    supervisor, superlink = build_supervisor(tmp_path)
    with pytest.raises(SupervisionError, match="3 times"):
        for _ in range(10):
            supervisor._start_app(superlink, tmp_path)  # type: ignore[arg-type]
    assert len(superlink.launched) == 3 and superlink.abandoned == ["1", "2"]
    assert len({config["launch"] for config in superlink.launched}) == 3


def test_server_supervisor_repeatable_failure_gives_up(tmp_path: Path) -> None:
    supervisor, superlink = build_supervisor(tmp_path)
    supervisor._start_app(superlink, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(NoQuorum), report_launch(tmp_path, superlink.launched[0]["launch"]):
        raise NoQuorum(5, 0.5)
    with pytest.raises(SupervisionError, match="5 rounds in a row failed") as caught:
        supervisor._start_app(superlink, tmp_path)  # type: ignore[arg-type]
    assert caught.value.too_few_devices and len(superlink.launched) == 1


def test_server_supervisor_recognizes_the_app_by_its_launch(tmp_path: Path) -> None:
    supervisor, superlink = build_supervisor(tmp_path)
    assert not supervisor._is_app_running()
    supervisor._start_app(superlink, tmp_path)  # type: ignore[arg-type]
    assert supervisor._is_app_running()  # it may still be starting
    with report_launch(tmp_path, superlink.launched[0]["launch"]):
        assert supervisor._is_app_running()
    report = json.loads((tmp_path / "app.json").read_text())
    (tmp_path / "app.json").write_text(json.dumps({**report, "pid": 2**22 + 1}))
    assert not supervisor._is_app_running()


def test_hold_pidfile_second_process_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_running(tmp_path) is None
    with hold_pidfile(tmp_path, run="x"):
        monkeypatch.setattr(processes, "command_line", lambda pid: "another program")
        assert read_running(tmp_path) is None
        monkeypatch.setattr(processes, "command_line", lambda pid: "fedloom deploy server")
        running = read_running(tmp_path)
        assert running is not None and running["run"] == "x"
        with pytest.raises(RecipeError, match="already running"), hold_pidfile(tmp_path, run="y"):
            pass
    assert read_pidfile(tmp_path) == {"run": "x", "pid": 0} and read_running(tmp_path) is None


def test_read_status_reports_devices_and_run(tmp_path: Path) -> None:
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
    (run / "participation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "events.jsonl").write_text('{"round": 2, "device": "0", "code": "LATE", "reason": ""}\n')
    with hold_pidfile(tmp_path, run=str(run)):
        pass
    status = read_status(tmp_path)
    assert [(device["tier"], device["last_round"], device["refusals"]) for device in status["devices"]] == [
        ("small", 1, 1),
        ("large", 1, 0),
    ]
    assert "after round 2" in status["summary"] and status["state"] == "finished"


def test_measure_bandwidth_is_added_once_the_server_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enroll_fleet(tmp_path, "127.0.0.1:1", "one", secure=False)
    supervisor = DeviceSupervisor(read_bundle(tmp_path / "devices" / "one"), {})
    file = tmp_path / "machine.json"
    file.write_text('{"memory": 5.0}')
    monkeypatch.setattr(device, "probe", lambda *_: pytest.fail("measured again"))
    for bandwidth, expected in ((float("inf"), {}), (7.0, {"bandwidth": 7.0}), (8.0, {"bandwidth": 7.0})):
        monkeypatch.setattr(device, "measure_bandwidth", lambda _, bandwidth=bandwidth: bandwidth)
        supervisor._measure(tmp_path)
        assert json.loads(file.read_text()) == {"memory": 5.0, **expected}


@dataclass
class FakeSuperNode:
    """A SuperNode that only logs. Its calls are recorded."""

    log: Path
    calls: list[str] = field(default_factory=list)

    def restart_if_ended(self) -> None:
        self.calls.append("check")

    def stop(self) -> None:
        self.calls.append("stop")

    def write(self, text: str) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(text)


def test_device_supervisor_restarts_a_supernode_whose_replies_would_be_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once only; what was logged before the supervisor started, and replies that are ignored, do not count."""
    enroll_fleet(tmp_path, "127.0.0.1:1", "one", secure=False)
    ignoring = f"INFO : Run ID 5 is not in `RUNNING` status. {device.WITHDRAWN}0abc.\n"
    node = FakeSuperNode(tmp_path / "log")
    node.write(ignoring)
    logged = iter(["Run ID 5 is not in `RUNNING` status. Ignoring reply message 0abc.\n", ignoring[:40], ignoring[40:]])

    def sleep(seconds: float) -> None:
        text = next(logged, None)
        if text is None:
            raise KeyboardInterrupt
        node.write(text)

    monkeypatch.setattr(device, "SupervisedProcess", lambda *_: node)
    monkeypatch.setattr(device, "check_server", lambda _: False)
    monkeypatch.setattr(DeviceSupervisor, "_measure", lambda *_: None)
    monkeypatch.setattr(device.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        DeviceSupervisor(read_bundle(tmp_path / "devices" / "one"), {}).run()
    assert node.calls == ["check", "check", "check", "stop", "check", "stop"]


def test_device_supervisor_knows_what_flower_logs_of_withdrawn_messages() -> None:
    source = inspect.getsource(pytest.importorskip("flwr.supernode.start_client_internal"))
    assert source.count(device.WITHDRAWN) == 1
