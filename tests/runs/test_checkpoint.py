"""Checkpoints survive crashes and bad disks, and a run is only resumed with the same inputs."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom
from fedloom import files
from fedloom.recipe.errors import RecipeError
from fedloom.recipe.load import dumps, load
from fedloom.recipe.registries import Registries
from fedloom.runs import checkpoint
from fedloom.runs.build import assemble
from fedloom.runs.checkpoint import FILES, KEPT, Checkpoint, CheckpointPolicy, Checkpoints
from fedloom.runs.folder import read_manifest
from fedloom.runs.recorder import record_rounds
from fedloom.runs.resume import ADDED_KEYS, find_newest_run, list_changes, reopen_run, verify
from fedloom.tensors import Parcel, Tensors
from tests.chaos import recipe
from tests.pickles import pickles_heard


def parcel(value: float, *names: str) -> dict[str, Tensors]:
    return {name: {"w": torch.full((2, 3), value), "n": torch.tensor(7)} for name in names}


def point(number: int, client_states: Mapping[str, Parcel] | None = None, **changes: Any) -> Checkpoint:
    return Checkpoint(
        number, parcel(number, "weights"), client_states or {}, {"sizes": {"rows.jsonl": number}}, **changes
    )


@pytest.fixture
def store(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints")


def size_of(store: Checkpoints, number: int) -> int:
    return (store.folder / f"{number:06d}.safetensors").stat().st_size


class TestStore:
    def test_checkpoints_roundtrip_keeps_everything(
        self, store: Checkpoints, parcels_equal: Callable[[Parcel, Parcel], bool]
    ) -> None:
        odd = {"a/b": {"half": torch.ones(2, dtype=torch.bfloat16), "none": torch.zeros(0, 3)}, "empty": {}}
        saved = Checkpoint(3, parcel(1.0, "weights", "x/y"), {"0": odd, "device 1": {}}, {"seconds": 1.5})
        store.save(saved)
        read = store.read_newest()
        assert read is not None
        assert (read.number, read.about) == (3, {"seconds": 1.5})
        assert parcels_equal(read.server, saved.server)
        assert read.client_states.keys() == saved.client_states.keys()
        assert all(
            parcels_equal(read.client_states[device], saved.client_states[device]) for device in saved.client_states
        )
        assert list(read.client_states["0"]) == list(odd)

    def test_checkpoints_unchanged_tensors_are_not_rewritten(self, store: Checkpoints) -> None:
        large = {"large": {"w": torch.zeros(1000)}}
        for number in range(1, FILES + 3):
            store.save(Checkpoint(number, {**large, **parcel(number, "weights")}, {"0": large}, versions={"0": 1}))
        sizes = [size_of(store, number) > 4000 for number in store.numbers()]
        assert sum(sizes) <= 1  # everything is written again now and then, so that old files can be deleted
        read = store.read_newest()
        assert read is not None
        assert torch.equal(read.server["large"]["w"], large["large"]["w"])
        assert torch.equal(read.client_states["0"]["large"]["w"], large["large"]["w"])

    def test_checkpoints_shared_tensors_are_written_once(self, store: Checkpoints) -> None:
        shared = {"w": torch.zeros(1000)}
        store.save(Checkpoint(1, {str(number): shared for number in range(50)}, {}))
        assert size_of(store, 1) < 10_000

    def test_checkpoints_state_of_new_version_is_written(self, store: Checkpoints) -> None:
        for number in (1, 2):
            store.save(point(number, {"0": parcel(number, "own")}, versions={"0": number}))
        read = store.read_newest()
        assert read is not None
        assert read.client_states["0"]["own"]["w"].eq(2).all()

    def test_checkpoints_prune_keeps_newest_and_best(self, store: Checkpoints) -> None:
        for number in range(1, 10):
            store.save(point(number), score=-abs(number - 2.0))
        assert store.numbers() == [2, *range(10 - KEPT, 10)]
        assert store.read(2).server["weights"]["w"].eq(2).all()
        kept = {path.name for path in store.folder.iterdir()}
        expected = {f"{number:06d}.{kind}" for number in store.numbers() for kind in ("json", "safetensors")}
        assert kept == expected | {"LATEST"}

    def test_checkpoints_damaged_file_is_detected(self, store: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
        """Damage at 200 positions in the files of the newest checkpoint: the one before it is read."""
        store.save(point(1))
        store.save(point(2))
        draw, files = random.Random(0), ["000002.json", "000002.safetensors", "LATEST"]
        fell_back = 0
        for trial in range(200):
            path = store.folder / files[trial % 3]
            whole = path.read_bytes()
            place = draw.randrange(len(whole))
            flipped = bytes([*whole[:place], whole[place] ^ (1 << draw.randrange(8)), *whole[place + 1 :]])
            path.write_bytes(whole[:place] if trial % 2 else flipped)
            caplog.clear()
            read = store.read_newest()
            assert read is not None
            assert read.number == 2 or (read.number == 1 and (caplog.messages or path.name == "LATEST"))
            assert read.server["weights"]["w"].eq(read.number).all()
            fell_back += read.number == 1
            path.write_bytes(whole)
        assert fell_back > 120  # all of the two files that matter

    def test_checkpoints_missing_file_is_detected(self, store: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
        store.save(point(1))
        store.save(point(2))
        (store.folder / "000002.safetensors").unlink()
        read = store.read_newest()
        assert read is not None
        assert read.number == 1
        assert caplog.messages == ["checkpoint of round 2 cannot be used: 000002.safetensors is missing or damaged"]

    def test_checkpoints_empty_folder_has_no_newest(self, store: Checkpoints) -> None:
        assert store.read_newest() is None

    @pytest.mark.parametrize("moment", range(1, 20))
    def test_checkpoints_disk_failure_keeps_last_valid(
        self, moment: int, store: Checkpoints, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.save(point(1))
        left = [moment]

        def failing(function: Callable[..., Any]) -> Callable[..., Any]:
            def tried(*arguments: Any, **names: Any) -> Any:
                left[0] -= 1
                if left[0] == 0:
                    raise OSError(28, "No space left on device")
                return function(*arguments, **names)

            return tried

        monkeypatch.setattr(files.os, "fsync", failing(os.fsync))
        monkeypatch.setattr(Path, "replace", failing(Path.replace))
        monkeypatch.setattr(Path, "unlink", failing(Path.unlink))
        try:
            store.save(point(2))
        except OSError:
            assert left[0] == 0
        monkeypatch.undo()
        read = Checkpoints(store.folder).read_newest()
        assert read is not None
        assert read.server["weights"]["w"].eq(read.number).all()


class TestCheckpointPolicy:
    def test_policy_every_saves_at_interval(self, store: Checkpoints) -> None:
        policy = CheckpointPolicy(store, every=2)
        for number in range(1, 6):
            policy.after(point(number))
        assert store.numbers() == [2, 4]
        policy.save()
        assert store.numbers() == [2, 4, 5]

    def test_policy_zero_saves_only_at_end(self, store: Checkpoints) -> None:
        policy = CheckpointPolicy(store, every=0)
        policy.after(point(1))
        assert store.numbers() == []
        policy.save()
        assert store.numbers() == [1]

    def test_policy_auto_stays_within_cost(self, store: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [0.0]
        monkeypatch.setattr(checkpoint.time, "perf_counter", lambda: now[0])
        slow = store.save

        def save(*arguments: Any) -> None:
            now[0] += 1.0
            slow(*arguments)

        monkeypatch.setattr(store, "save", save)
        policy, saved = CheckpointPolicy(store, started=0.0), 0
        for number in range(1, 401):
            now[0] += 1.0
            policy.after(point(number))
            saved += policy.saved == number
        assert policy.spent <= 0.05 * now[0]
        assert saved >= 15


class TestRuns:
    @pytest.fixture
    def interrupted(self, tmp_path: Path) -> Path:
        """A run that was interrupted after five of eight rounds."""
        document = recipe("heterofl", rounds=8)
        steps = record_rounds(assemble(load(document, Registries()), Registries(), tmp_path), tmp_path / "run")
        for done in steps:
            if done.number == 5:
                break
        steps.close()  # type: ignore[attr-defined]
        return tmp_path / "run"

    def resume(self, folder: Path) -> Iterator[Any]:
        experiment, since = reopen_run(folder, Registries(), folder, 1)
        return record_rounds(experiment, folder, since)

    def test_resume_interrupted_run_gives_same_result(self, interrupted: Path) -> None:
        assert read_manifest(interrupted)["status"] == "interrupted"
        assert [done.number for done in self.resume(interrupted)] == [6, 7, 8]
        whole = fedloom.run(recipe("heterofl", rounds=8), out=interrupted.parent / "whole")
        assert read_manifest(interrupted)["sha256"] == read_manifest(whole.folder)["sha256"]
        assert (interrupted / "rows.jsonl").read_bytes() == (whole.folder / "rows.jsonl").read_bytes()

    def test_resume_reads_no_pickle(self, tmp_path: Path) -> None:
        """With client states, and with the recipe read from a file."""
        written = tmp_path / "recipe.toml"
        written.write_text(dumps(recipe("fedhenn", rounds=3)))
        with pickles_heard() as heard:
            steps = record_rounds(assemble(load(written, Registries()), Registries(), tmp_path), tmp_path / "run")
            next(steps)
            steps.close()  # type: ignore[attr-defined]
            assert [done.number for done in self.resume(tmp_path / "run")] == [2, 3, 4]  # a last exchange
        assert heard == []

    def test_resume_drops_rows_after_checkpoint(self, interrupted: Path) -> None:
        with (interrupted / "rows.jsonl").open("a") as file:
            file.write('{"round": 6, "half a li')
        list(self.resume(interrupted))
        whole = fedloom.run(recipe("heterofl", rounds=8), out=interrupted.parent / "whole")
        assert (interrupted / "rows.jsonl").read_bytes() == (whole.folder / "rows.jsonl").read_bytes()

    def test_resume_without_valid_checkpoint_starts_again(
        self, interrupted: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        for path in (interrupted / "checkpoints").glob("*.safetensors"):
            path.write_bytes(b"")
        experiment, since = reopen_run(interrupted, Registries(), interrupted, 1)
        assert (since.number, len(caplog.messages)) == (0, KEPT)
        assert [done.number for done in record_rounds(experiment, interrupted, since)] == list(range(1, 9))

    def test_reopen_run_changed_recipe_is_refused_with_changes(self, interrupted: Path) -> None:
        path = interrupted / "recipe.toml"
        path.write_text(path.read_text().replace("batch_size = 6", "batch_size = 3"))
        with pytest.raises(RecipeError) as refused:
            reopen_run(interrupted, Registries(), interrupted, 1)
        assert refused.value.issues[0].code == "RECIPE_CHANGED"
        assert "training.batch_size was 6, is 3" in str(refused.value)

    def test_reopen_run_of_release_without_a_key_is_resumed(self, interrupted: Path) -> None:
        manifest = interrupted / "checkpoints" / "000005.json"
        content = json.loads(manifest.read_text())
        content.pop("sha256")
        for section, keys in ADDED_KEYS.items():
            for key in keys if section != "engine" else ():  # kernels may have been chosen
                del content["about"]["recipe"][section][key]
        manifest.write_text(json.dumps({**content, "sha256": checkpoint._digest(content)}))
        assert reopen_run(interrupted, Registries(), interrupted, 1)[1].number == 5

    def test_reopen_run_other_data_is_refused(self, interrupted: Path) -> None:
        manifest = interrupted / "checkpoints" / "000005.json"
        content = json.loads(manifest.read_text())
        content.pop("sha256")
        content["about"]["data"] = "other"
        manifest.write_text(json.dumps({**content, "sha256": checkpoint._digest(content)}))
        with pytest.raises(RecipeError, match="DATA_CHANGED"):
            reopen_run(interrupted, Registries(), interrupted, 1)

    def test_reopen_run_finished_is_refused(self, interrupted: Path) -> None:
        list(self.resume(interrupted))
        with pytest.raises(RecipeError, match="RUN_FINISHED"):
            self.resume(interrupted)

    def test_reopen_run_other_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(RecipeError, match="RUN_FOLDER"):
            self.resume(tmp_path)

    def test_find_newest_run_prefers_unfinished(self, interrupted: Path) -> None:
        fedloom.run(recipe("heterofl", rounds=1), out=interrupted.parent / "later")
        assert find_newest_run(interrupted.parent) == interrupted
        with pytest.raises(RecipeError, match="there is no run here"):
            find_newest_run(interrupted / "models")

    @pytest.mark.parametrize("back", [1, 2, 100])
    def test_verify_unchanged_run_has_no_differences(self, back: int, interrupted: Path) -> None:
        list(self.resume(interrupted))
        before = sorted((path, path.stat().st_mtime_ns) for path in interrupted.rglob("*"))
        found = verify(interrupted, Registries(), interrupted, back, 1)
        assert not found.differences
        assert found.rounds >= min(back, 8)
        assert sorted((path, path.stat().st_mtime_ns) for path in interrupted.rglob("*")) == before

    @pytest.mark.parametrize("what", ["sha256", "devices_sha256", "rows"])
    def test_verify_changed_run_names_difference(self, what: str, interrupted: Path) -> None:
        list(self.resume(interrupted))
        if what == "rows":
            lines = (interrupted / "rows.jsonl").read_text().splitlines()
            last = json.loads(lines[-1])
            lines[-1] = json.dumps({**last, "value": last["value"] + 1})
            (interrupted / "rows.jsonl").write_text("\n".join(lines) + "\n")
        else:
            manifest = read_manifest(interrupted)
            (interrupted / "manifest.json").write_text(json.dumps({**manifest, what: "0"}))
        (difference,) = verify(interrupted, Registries(), interrupted, 1, 1).differences
        assert what in difference

    @pytest.mark.parametrize(
        "changes",
        [
            {"faults": {"dropout": 0.3, "outages": [{"tier": "small", "from": 2, "to": 6}], "quorum": 0.3}},
            {"admission": {"norm": 1.01, "quarantine": 2}},
            {"privacy": {"clip": 1.0, "noise": 0.5}, "fleet": {"participation": 0.5, "sampling": "poisson"}},
            {"aggregation": {"rule": "default"}},
        ],
        ids=lambda changes: next(iter(changes)),
    )
    def test_resume_restores_run_state(self, changes: Mapping[str, Any], tmp_path: Path) -> None:
        document = {**recipe("heterofl", rounds=8), **changes}
        if "privacy" in changes:
            document["method"] = {"name": "heterofl", "only_seen_rows": False}
            document["model"] = {"hidden": [2, 4], "normalization": "none"}
        whole = fedloom.run(document, out=tmp_path / "whole").folder
        for left in range(1, 8):
            folder = tmp_path / str(left)
            steps = record_rounds(assemble(load(document, Registries()), Registries(), tmp_path), folder)
            for _ in range(left):
                next(steps)
            steps.close()  # type: ignore[attr-defined]
            list(self.resume(folder))
            assert read_manifest(folder)["sha256"] == read_manifest(whole)["sha256"]
            for lines in ("rows.jsonl", "events.jsonl"):
                assert (folder / lines).read_bytes() == (whole / lines).read_bytes()

    @pytest.mark.parametrize("family", ["fedhenn", "fedin"])
    def test_verify_compares_client_states(self, family: str, tmp_path: Path) -> None:
        done = fedloom.run(recipe(family, rounds=4), out=tmp_path / "run")
        assert not verify(done.folder, Registries(), tmp_path, 2, 1).differences

    def test_resume_moved_folder_works(self, interrupted: Path) -> None:
        shutil.move(interrupted, interrupted.parent / "elsewhere")
        assert [done.number for done in self.resume(interrupted.parent / "elsewhere")] == [6, 7, 8]


@pytest.mark.parametrize(
    ("before", "now", "content"),
    [
        ({"a": 1}, {"a": 2}, ["a was 1, is 2"]),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, ["a.b[1] was 2, is 3"]),
        ({"a": [1]}, {"a": [1, 2]}, ["a was [1], is [1, 2]"]),
        ({"a": 1}, {"b": "x"}, ["a was 1, is not set", "b was not set, is 'x'"]),
        ({"a": 1}, {"a": 1}, []),
    ],
)
def test_list_changes_names_keys_and_values(before: Any, now: Any, content: list[str]) -> None:
    assert list(list_changes(before, now)) == content
