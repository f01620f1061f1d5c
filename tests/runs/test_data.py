"""Data of the server and of the devices, the validation set, and devices that never train."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.data import Partition
from fedloom.recipe.errors import RecipeError
from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries
from fedloom.runs.build import assemble, build
from fedloom.runs.data import read_data_spec

TABLES = Registries()


@pytest.fixture
def made(document: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
    return lambda **changes: assemble(load(document(**changes), TABLES), TABLES, Path("nowhere"))


def test_public_holdout_belongs_to_no_device(made: Callable[..., Any]) -> None:
    experiment = made(data__public={"examples": 100})
    held = np.concatenate(experiment.partition.train)
    train = experiment.dataset.train.x
    assert len(experiment.public) == 100
    assert len(set(held.tolist())) == len(held) == (len(train) - 100) // 4 * 4
    theirs = {train[row].numpy().tobytes() for row in held.tolist()}
    ours = [image.numpy().tobytes() for image in experiment.public]
    repeated = {train[row].numpy().tobytes() for row in set(range(len(train))) - set(held.tolist())}
    assert set(ours) <= repeated
    assert sum(image in theirs for image in ours) < 5  # the same picture may be there twice


def test_public_holdout_depends_on_seed_only(made: Callable[..., Any]) -> None:
    one, same, other = (made(data__public={"examples": 50}, seed=seed).public for seed in (0, 0, 1))
    assert one.equal(same)
    assert not one.equal(other)


def test_build_partition_by_labels_leaves_out_holdout(made: Callable[..., Any]) -> None:
    experiment = made(
        data__public={"examples": 200}, data__partition={"kind": "dirichlet", "alpha": 1.0, "balanced": False}
    )
    assert sum(map(len, experiment.partition.train)) == len(experiment.dataset.train) - 200


def test_build_partition_file_with_held_out_examples_is_refused(made: Callable[..., Any], tmp_path: Path) -> None:
    free = made(data__public={"examples": 60}).partition
    free.save(tmp_path / "free.json")
    again = made(data__public={"examples": 60}, data__partition={"kind": "file", "path": str(tmp_path / "free.json")})
    assert again.partition.fingerprint() == free.fingerprint()
    everything = np.array_split(np.arange(1437), 4)
    Partition(tuple(everything), free.test).save(tmp_path / "all.json")
    with pytest.raises(RecipeError, match=r"holds out for the server"):
        made(data__public={"examples": 60}, data__partition={"kind": "file", "path": str(tmp_path / "all.json")})


def test_public_train_pool_is_training_data(made: Callable[..., Any]) -> None:
    experiment = made(data__public={"source": "train_pool"})
    assert experiment.public.data_ptr() == experiment.dataset.train.x.data_ptr()


def test_public_dataset_of_other_shape_is_refused(made: Callable[..., Any]) -> None:
    public = made(data__public={"source": "dataset", "dataset": "digits", "examples": 9}).public
    assert public.shape == (9, 1, 8, 8)
    with pytest.raises(RecipeError, match=r"shape \(1, 28, 28\)"):
        made(data__public={"source": "dataset", "dataset": "fashion-mini"})


@pytest.mark.parametrize("public", [{"source": "dataset"}, {"source": "dataset", "dataset": "nothing"}])
def test_public_dataset_unknown_is_refused(public: dict[str, Any], made: Callable[..., Any]) -> None:
    with pytest.raises(RecipeError, match=r"data\.public\.dataset"):
        made(data__public=public)


def test_public_holdout_of_everything_is_refused(made: Callable[..., Any]) -> None:
    with pytest.raises(RecipeError, match="only 1437"):
        made(data__public={"examples": 1437})


def test_build_method_without_needed_public_data_is_refused(made: Callable[..., Any]) -> None:
    with pytest.raises(RecipeError, match="PUBLIC_MISSING"):
        made(method={"name": "fedhenn"})
    assert made(method={"name": "fedhenn", "strength": 0.0}).public is None


def test_build_partition_subsample_shrinks_share_of_devices(made: Callable[..., Any]) -> None:
    sizes = sorted(map(len, made(data__subsample={"devices": 0.5, "keep": 0.25}).partition.train))
    assert sizes == [90, 90, 359, 359]


def test_run_holdout_devices_are_evaluated_but_not_trained(run: Callable[..., Any]) -> None:
    done = run(
        data__devices=8, fleet={"holdout_fraction": 0.25}, method={"name": "fedrep"}, rounds=2, training={"epochs": 5},
        tiers=[{"name": "all", "share": 1.0}], evaluation={"tests": ["local"], "per_device": "always"},
    )  # fmt: skip
    rows = [row for row in done.rows() if row.metric == "accuracy" and row.device]
    of = {test: {row.device for row in rows if row.test == test} for test in ("local", "unseen")}
    assert (len(of["local"]), len(of["unseen"])) == (6, 2)
    assert of["local"].isdisjoint(of["unseen"])
    before, after = (
        np.mean([row.value for row in rows if row.test == "unseen" and row.round == number]) for number in (2, 3)
    )
    assert after > before  # the last exchange gave them heads
    events = [json.loads(line) for line in (done.folder / "events.jsonl").read_text().splitlines()]
    assert events == []


def test_build_fleet_all_devices_held_out_is_refused(made: Callable[..., Any]) -> None:
    with pytest.raises(RecipeError, match=r"fleet\.holdout_fraction"):
        made(fleet={"holdout_fraction": 1.0})


def test_check_fine_tuning_labels_per_position_is_refused() -> None:
    tuning = 'evaluation.fine_tune={part="head", epochs=1, batch_size=10, lr=0.1}'
    loaded = load(Path(__file__).parents[2] / "recipes" / "heterofl_wikitext2_small.toml", TABLES, [tuning])
    with pytest.raises(RecipeError, match="label for every position"):
        build(loaded, TABLES, read_data_spec(loaded, TABLES, Path("nowhere")))


def test_read_data_validation_replaces_test_set(made: Callable[..., Any]) -> None:
    usual = made().dataset
    one, other = (made(data__validation=300, seed=seed) for seed in (0, 1))
    assert len(one.dataset.test) == 300 and len(one.dataset.train) == len(usual.train) - 300
    assert one.dataset.test.x.equal(other.dataset.test.x)  # for every seed
    whole = torch.cat([one.dataset.train.x, one.dataset.test.x]).flatten(1)
    assert whole.double().sum(0).equal(usual.train.x.flatten(1).double().sum(0))  # nothing of the test set is in it
    assert max(int(rows.max()) for rows in one.partition.test) < 300
    fewer = made(data__validation=300, data__test_examples=100).dataset
    assert fewer.test.y.equal(one.dataset.test.y[:100])


def test_read_data_spec_counts_validation_set(document: Callable[..., dict[str, Any]]) -> None:
    loaded = load(document(data__dataset="mnist", data__validation=1000), TABLES)
    seen = read_data_spec(loaded, TABLES, Path("nowhere"))
    assert (len(seen.labels.train), len(seen.labels.test)) == (59_000, 1000)


def test_read_data_validation_of_everything_is_refused(made: Callable[..., Any]) -> None:
    with pytest.raises(RecipeError, match=r"data\.validation"):
        made(data__validation=10_000)
