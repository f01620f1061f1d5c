"""A real fleet, started by the commands a user types, with TLS, keys and the proxy: impostors are refused, each for its
own reason, and a run survives the death of its processes."""

import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import fedloom.flower  # noqa: F401

pytest.importorskip("flwr")

from fedloom.deploy.processes import executable_path, find_free_port, flower_environment
from fedloom.recipe.load import dumps
from tests.fleet_chaos import recipe, run_with_kills
from tests.real_fleet import enroll_fleet, read_lines, real_fleet
from tests.superlink import await_port, start_process

LIAR = '''"""A device that sends false replies in some rounds."""

import dataclasses
import json
from pathlib import Path

from safetensors.torch import load_file, save_file

import fedloom.flower.apps as device

honest, saved = device.encode_reply, Path(__file__).with_name("saved")


def encode_reply(heading, sent, has_new_state):
    if heading.round == 1:
        saved.with_suffix(".json").write_text(json.dumps([dataclasses.asdict(heading), list(sent)]))
        for name, tensors in sent.items():
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, saved.with_suffix("." + name))
    if heading.round == 2:  # its reply of round 1
        fields, names = json.loads(saved.with_suffix(".json").read_text())
        sent = {name: load_file(saved.with_suffix("." + name)) for name in names}
        return honest(type(heading)(**fields), sent, has_new_state)
    lies = {3: {"tier": "large"}, 4: {"run": "another"}}
    return honest(dataclasses.replace(heading, **lies.get(heading.round, {})), sent, has_new_state)


device.encode_reply = encode_reply
DATASETS = {"of-a-liar": encode_reply}
'''


def start_stranger(home: Path, server: str, *lock: str) -> AbstractContextManager[object]:
    """A SuperNode that is not enrolled."""
    home.mkdir()
    command = ["flower-supernode", "--superlink", server, "--port", str(find_free_port()), *lock]
    return start_process(command, home / "log", flower_environment(home))


def run_command(home: Path, server: str, authority: Path) -> "subprocess.CompletedProcess[str]":
    """Flower's own command, sent from outside with the server's certificate."""
    home.mkdir()
    trust = f'address = "{server}"\nroot-certificates = "{authority}"\n'
    (home / "config.toml").write_text(f"[superlink.proxy]\n{trust}", encoding="utf-8")
    command = [executable_path("flwr"), "supernode", "list", "proxy", "--format", "json"]
    return subprocess.run(
        command, env=flower_environment(home), capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
def test_real_fleet_six_impostors_are_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(dumps(recipe(4, 2)), encoding="utf-8")
    (tmp_path / "liar.py").write_text(LIAR, encoding="utf-8")
    out, others = tmp_path / "run", enroll_fleet(tmp_path / "others", "127.0.0.1:1", "x")
    key, their_authority = others.folder / "devices" / "x" / "key", others.folder / "ca.crt"
    with real_fleet(tmp_path / "ours", ["honest:large", "liar:small"]) as fleet:
        fleet.serve(tmp_path / "recipe.toml", out)
        fleet.join("honest")
        fleet.start("liar", "deploy", "device", str(fleet.bundle("liar")), "--with", str(tmp_path / "liar.py"))
        server, trust = f"127.0.0.1:{fleet.port}", ["--root-certificates", str(fleet.folder / "ca.crt")]
        proof = ["--auth-supernode-private-key", str(key)]
        with (
            start_stranger(tmp_path / "plain", server, "--insecure"),
            start_stranger(tmp_path / "distrustful", server, "--root-certificates", str(their_authority), *proof),
            start_stranger(tmp_path / "unknown", server, *trust, *proof),
        ):
            await_port(fleet.port)
            refused = run_command(tmp_path / "outsider", server, fleet.folder / "ca.crt")
            fleet.await_end(600)
    assert '"success": true' not in refused.stdout and "node-id" not in refused.stdout, refused
    events = read_lines(out / "events.jsonl")
    found = {(event["code"], event["reason"].partition(": ")[2] or event["reason"]) for event in events}
    reasons = {code: [reason for other, reason in sorted(found) if other == code] for code, _ in found}
    assert reasons["PLAINTEXT"] == ["connection without TLS"]
    assert any("unknown ca" in reason for reason in reasons["TLS"])
    assert all(reason.startswith("/v1/control/") for reason in reasons["NOT_FOR_DEVICES"])
    assert reasons["UNREGISTERED"] == ["the key is not registered in this fleet"]
    liars = {(event["round"], event["code"]): event["reason"] for event in events if event["device"] == "1"}
    assert set(liars) == {(2, "STALE"), (3, "TIER_MISMATCH"), (4, "STALE")}
    assert liars[2, "STALE"] != liars[4, "STALE"]
    assert {event["device"] for event in events} == {"", "1"}


@pytest.mark.slow
def test_real_fleet_killed_processes_do_not_change_the_weights() -> None:
    assert "the same weights" in run_with_kills(("app", "link"), seed=1, devices=2, rounds=4)
