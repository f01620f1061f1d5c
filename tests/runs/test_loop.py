"""The loop: the same recipe gives the same bits, rounds are evaluated when due, runs start as the recipe says."""

import json
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file, save_file

import fedloom
from fedloom.fleet import tier_slices
from fedloom.methods import Method
from fedloom.recipe.errors import RecipeError
from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries
from fedloom.runs.build import assemble
from fedloom.runs.recorder import record_rounds


@dataclass(frozen=True)
class Still(Method):
    """Keeps what it starts from."""

    def start(self, fleet, seed, warm_start=None):
        return {"weights": warm_start or fleet.global_model.initial_weights(seed)}

    def round(self, server, context):
        return server

    def eval_targets(self, server):
        return {"server": tier_slices(server["weights"])}


def manifest(run):
    return json.loads((run.folder / "manifest.json").read_text())


def select_rows(run, **wanted):
    """(round, tier, device) -> value."""
    return {
        (row.round, row.tier, row.device): row.value
        for row in run.rows()
        if all(getattr(row, key) == value for key, value in wanted.items())
    }


def test_run_two_tiers_both_learn(run):
    done = run(
        rounds=4,
        model__hidden=[8, 16],
        training={"epochs": 2, "batch_size": 20, "optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.9}},
        evaluation={"every": 4},
    )
    last = select_rows(done, metric="accuracy", test="global")
    assert last[4, "large", ""] > 80
    assert last[4, "small", ""] > 60


@pytest.mark.parametrize("method", ["heterofl", "standalone"])
def test_run_same_recipe_gives_same_rows(method, run):
    first, second = run("first", method={"name": method}), run("second", method={"name": method})
    assert first.rows() == second.rows()
    assert manifest(first)["sha256"] == manifest(second)["sha256"]


def test_run_other_seed_gives_other_result(run):
    first, second = run("first", rounds=1), run("second", rounds=1, seed=1)
    assert manifest(first)["data"] == manifest(second)["data"]
    for key in ("partition", "sha256"):
        assert manifest(first)[key] != manifest(second)[key]


@pytest.mark.parametrize(
    ("share", "rounds"),
    [
        (0.35, [4, 7, 8, 9, 10]),
        *(
            pytest.param(share, rounds, marks=pytest.mark.slow)
            for share, rounds in ((0.0, [4, 8, 10]), (0.2, [4, 8, 9, 10]), (1.0, list(range(1, 11))))
        ),
    ],
)
def test_run_dense_last_evaluates_every_round_at_the_end(share, rounds, run):
    done = run(rounds=10, evaluation={"every": 4, "dense_last": share, "tests": ["global"]})
    assert [number for number, tier, _ in select_rows(done, metric="accuracy") if tier == "large"] == rounds


def test_run_leaves_global_random_state_unchanged(run):
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    run(rounds=1)
    assert torch.equal(torch.rand(4), wanted)


@pytest.mark.parametrize("method", ["heterofl", "standalone"])
def test_run_block_size_changes_only_rounding(method, run):
    runs = [run(f"block {size}", method={"name": method}, engine={"devices_per_block": size}) for size in (1, 3, 16)]
    for other in runs[1:]:
        one_example = 100 / 360
        for test in ("global", "local"):
            ours, theirs = (select_rows(one, metric="accuracy", test=test, device="") for one in (runs[0], other))
            assert ours.keys() == theirs.keys()
            assert all(abs(ours[key] - theirs[key]) <= one_example + 1e-9 for key in ours)
        ours, theirs = (select_rows(one, metric="loss") for one in (runs[0], other))
        assert theirs == pytest.approx(ours, rel=1e-5)


@pytest.mark.parametrize(
    ("rounds", "every", "due"), [(5, 2, {2, 4, 5}), (4, 2, {2, 4}), (2, 9, {2}), (3, 1, {1, 2, 3})]
)
def test_run_evaluates_when_due_and_last_round(rounds, every, due, run):
    done = run(
        options={"registries": Registries().with_names(methods={"still": Still})},
        method={"name": "still"},
        rounds=rounds,
        evaluation={"every": every},
    )
    assert {row.round for row in done.rows() if row.candidate} == due
    assert {row.round for row in done.rows() if row.metric == "bytes_down"} == set(range(1, rounds + 1))


@pytest.mark.parametrize(("when", "rounds"), [("last", {2}), ("always", {1, 2}), ("never", set())])
@pytest.mark.parametrize("method", ["heterofl", "standalone"])
def test_run_per_device_rows_follow_setting(method, when, rounds, run):
    done = run(method={"name": method}, evaluation={"per_device": when})
    assert {row.round for row in done.rows() if row.device} == rounds
    assert {row.round for row in done.rows() if row.candidate and not row.device} == {1, 2}


@pytest.mark.parametrize("tests", [["global"], ["local"]])
def test_run_evaluates_only_chosen_tests(tests, run):
    done = run(rounds=1, evaluation={"tests": tests})
    assert {row.test for row in done.rows() if row.candidate} == set(tests)


def test_run_participation_limits_cohort(run):
    done = run(rounds=1, fleet={"participation": 0.25})
    assert [row.value for row in done.rows() if row.metric == "bytes_down"] in ([4 * 158], [4 * 66])


@pytest.mark.parametrize("source", ["folder", "file"])
def test_run_start_from_uses_earlier_model(source, run):
    first = run("first", rounds=1)
    large = load_file(first.folder / "models" / "large.safetensors")
    start = first.folder if source == "folder" else first.folder / "models" / "large.safetensors"
    still = run(
        "second",
        options={"registries": Registries().with_names(methods={"still": Still})},
        method={"name": "still"},
        rounds=1,
        start={"from": str(start)},
    )
    assert manifest(still)["sha256"] == manifest(first)["sha256"]
    for name, weight in load_file(still.folder / "models" / "large.safetensors").items():
        assert torch.equal(weight, large[name])


def test_run_start_from_changes_result(run):
    first = run("first", rounds=1)
    second = run("second", rounds=1, start={"from": str(first.folder)})
    anew = run("anew", rounds=1)
    assert manifest(first)["sha256"] == manifest(anew)["sha256"] != manifest(second)["sha256"]


def a_file_of_another_shape(folder):
    save_file({"blocks.0.0.weight": torch.zeros(7, 1, 3, 3)}, folder / "start")


def a_file_of_other_names(folder):
    save_file({"other": torch.zeros(1)}, folder / "start")


def a_file_of_something_else(folder):
    (folder / "start").write_text("no tensors")


def a_folder_of_something_else(folder):
    (folder / "start").mkdir()


def nothing_at_all(folder):
    pass


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (a_file_of_another_shape, "START_SHAPE"),
        (a_file_of_other_names, "START_SHAPE"),
        (a_file_of_something_else, None),
        (a_folder_of_something_else, "FILE_MISSING"),
        (nothing_at_all, "FILE_MISSING"),
    ],
)
def test_run_unusable_start_is_refused_before_writing(make, code, run, tmp_path):
    make(tmp_path)
    with pytest.raises(RecipeError) as caught:
        run(start={"from": str(tmp_path / "start")})
    (problem,) = caught.value.issues
    assert problem.key_path == ("start", "from")
    assert code in (problem.code, None)
    assert not (tmp_path / "run").exists()


def test_record_rounds_yields_each_written_round(document, tmp_path):
    experiment = assemble(load(document(), Registries()), Registries(), tmp_path)
    seen = []
    for done in record_rounds(experiment, tmp_path / "run"):
        written = (tmp_path / "run" / "rows.jsonl").read_text().splitlines()
        seen.append((done.number, done.of, done.traffic.replied, done.refused, len(written)))
        assert json.loads((tmp_path / "run" / "manifest.json").read_text())["status"] == "running"
    assert [one[:4] for one in seen] == [(1, 2, 4, ()), (2, 2, 4, ())]
    assert 0 < seen[0][4] < seen[1][4]
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["status"] == "finished"


def test_record_rounds_left_early_is_interrupted(document, tmp_path):
    experiment = assemble(load(document(), Registries()), Registries(), tmp_path)
    for _ in record_rounds(experiment, tmp_path / "run"):
        break
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["status"] == "interrupted"


def test_run_existing_folder_is_refused(run, tmp_path):
    first = run("taken", rounds=1)
    before = manifest(first)
    with pytest.raises(RecipeError, match="OUT_EXISTS"):
        run("taken", rounds=1)
    assert manifest(first) == before


def test_run_bad_recipe_leaves_no_folder(document, tmp_path):
    with pytest.raises(RecipeError):
        fedloom.run(document(method={"name": "fedavg"}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_run_accepts_sets_and_folders(document, tmp_path):
    done = fedloom.run(document(), sets=["rounds=1", "data.devices=2"], out=str(tmp_path / "run"), data_dir=tmp_path)
    assert done.folder == tmp_path / "run"
    assert {row.round for row in done.rows()} == {1}
