"""A real fleet by the commands a user types: TLS, keys, a gate. Whoever should not be heard is not, each for its own
reason; and a run outlives what it runs on."""

import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from fedloom.deploy.processes import executable_path, find_free_port, flower_environment
from fedloom.recipe.toml import dumps
from tests.fleet_chaos import one_run, recipe
from tests.real_fleet import enroll_fleet, lines, real_fleet
from tests.superlink import await_port, started

LIAR = '''"""A device that says now and then what it should not; installed on it, so no server can prevent it."""

import dataclasses
import json
from pathlib import Path

from safetensors.torch import load_file, save_file

import fedloom.flower.apps as device

honest, kept = device.encode_reply, Path(__file__).with_name("kept")


def answer(heading, sent, remembers):
    if heading.round == 1:
        kept.with_suffix(".json").write_text(json.dumps([dataclasses.asdict(heading), list(sent)]))
        for name, tensors in sent.items():
            save_file({key: one.contiguous() for key, one in tensors.items()}, kept.with_suffix("." + name))
    if heading.round == 2:  # what it said before, word for word
        said, names = json.loads(kept.with_suffix(".json").read_text())
        sent = {name: load_file(kept.with_suffix("." + name)) for name in names}
        return honest(type(heading)(**said), sent, remembers)
    lies = {3: {"tier": "large"}, 4: {"run": "another"}}
    return honest(dataclasses.replace(heading, **lies.get(heading.round, {})), sent, remembers)


device.encode_reply = answer
DATASETS = {"of-a-liar": answer}
'''


def stranger(home: Path, server: str, *lock: str) -> AbstractContextManager[object]:
    """A SuperNode that nobody has invited."""
    home.mkdir()
    command = ["flower-supernode", "--superlink", server, "--port", str(find_free_port()), *lock]
    return started(command, home / "log", flower_environment(home))


def commanded(home: Path, server: str, authority: Path) -> "subprocess.CompletedProcess[str]":
    """Flower's own command, by somebody who is not at the server but has its certificate."""
    home.mkdir()
    trust = f'address = "{server}"\nroot-certificates = "{authority}"\n'
    (home / "config.toml").write_text(f"[superlink.gate]\n{trust}", encoding="utf-8")
    command = [executable_path("flwr"), "supernode", "list", "gate", "--format", "json"]
    return subprocess.run(
        command, env=flower_environment(home), capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
def test_six_who_are_not_heard(tmp_path: Path) -> None:
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
            stranger(tmp_path / "plain", server, "--insecure"),
            stranger(tmp_path / "distrustful", server, "--root-certificates", str(their_authority), *proof),
            stranger(tmp_path / "unknown", server, *trust, *proof),
        ):
            await_port(fleet.port)
            refused = commanded(tmp_path / "outsider", server, fleet.folder / "ca.crt")
            fleet.await_end(600)
    assert '"success": true' not in refused.stdout and "node-id" not in refused.stdout, refused
    events = lines(out / "events.jsonl")
    found = {(one["code"], one["reason"].partition(": ")[2] or one["reason"]) for one in events}
    said = {code: [reason for one, reason in sorted(found) if one == code] for code, _ in found}
    assert said["PLAINTEXT"] == ["connection without TLS"]
    assert any("unknown ca" in reason for reason in said["TLS"])
    assert all(reason.startswith("/v1/control/") for reason in said["NOT_FOR_DEVICES"])
    assert said["UNREGISTERED"] == ["the key is not registered in this fleet"]
    liars = {(one["round"], one["code"]): one["reason"] for one in events if one["device"] == "1"}
    assert set(liars) == {(2, "STALE"), (3, "TIER_MISMATCH"), (4, "STALE")}
    assert liars[2, "STALE"] != liars[4, "STALE"]
    assert {one["device"] for one in events} == {"", "1"}


@pytest.mark.slow
def test_a_run_outlives_what_it_runs_on() -> None:
    assert "the same weights" in one_run(("app", "link"), seed=1, devices=2, rounds=4)
