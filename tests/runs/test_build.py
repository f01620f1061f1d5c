"""Every setting of a recipe reaches the object that it configures."""

import numpy as np
import pytest

from fedloom.client import Constant, Milestones, Schedule, Sgd
from fedloom.data import PREPARATIONS, DataMissing, Partition
from fedloom.evaluation import BatchNormStatistics
from fedloom.methods.heterofl import HeteroFL
from fedloom.recipe.errors import RecipeError
from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries
from fedloom.runs.build import assemble


@pytest.fixture
def made(document, tmp_path):
    def make(**changes):
        return assemble(load(document(**changes), Registries()), Registries(), tmp_path)

    return make


def test_assemble_minimal_recipe_has_defaults(made):
    experiment = made()
    assert experiment.engine.schedule == Schedule(batch_size=100, epochs=1, last="keep")
    assert experiment.engine.optimizer == Sgd()
    assert experiment.engine.lr_schedule == Constant()
    assert experiment.method == HeteroFL()
    assert experiment.evaluator.statistics == BatchNormStatistics()


def test_assemble_training_settings_reach_engine(made):
    experiment = made(
        training={
            "epochs": 3, "batch_size": 7, "last_batch": "wrap", "optimizer": {"kind": "sgd", "momentum": 0.5},
            "lr_schedule": {"kind": "milestones", "rounds": [4, 6]},
        },
        engine={"devices_per_block": 5},
        seed=9,
    )  # fmt: skip
    assert experiment.engine.schedule == Schedule(batch_size=7, epochs=3, last="wrap")
    assert experiment.engine.optimizer == Sgd(momentum=0.5)
    assert experiment.engine.lr_schedule == Milestones(rounds=(4, 6))
    assert (experiment.engine.devices_per_block, experiment.engine.seed, experiment.fleet.seed) == (5, 9, 9)


def test_assemble_fleet_settings_reach_fleet(made):
    experiment = made(data__devices=10, fleet={"assignment": "redrawn", "eligible": ["small"]})
    fleet = experiment.fleet
    assert (fleet.size, fleet.shares, fleet.assignment, fleet.eligible_tiers) == (10, (0.5, 0.5), "redrawn", ("small",))
    assert (fleet.largest.name, fleet.smallest.name) == ("small", "small")  # of those that take part
    assert [tier.name for tier in fleet.tiers] == ["large", "small"]
    assert len(experiment.partition.train) == len(experiment.evaluator.local_tests) == 10


def test_assemble_method_settings_reach_method(made):
    experiment = made(method={"name": "heterofl", "mask_unseen_labels": False, "weighting": "examples"})
    assert experiment.method == HeteroFL(mask_unseen_labels=False, weighting="examples")


def test_assemble_evaluation_settings_reach_evaluator(made):
    experiment = made(
        evaluation={"tests": ["local"], "batch_size": 11, "statistics": {"query": "per_device", "batch_size": 5}}
    )
    assert (experiment.evaluator.tests, experiment.evaluator.batch_size) == (("local",), 11)
    assert experiment.evaluator.statistics == BatchNormStatistics(query="per_device", batch_size=5)


def test_assemble_preparation_replaces_that_of_dataset(made):
    assert made(data__preparation="crop_flip").dataset.preparation == PREPARATIONS["crop_flip"]
    assert made(data__preparation="fedin_fashion").dataset.input_shape == (1, 32, 32)
    assert made().dataset.preparation == PREPARATIONS["plain"]


def test_build_models_tier_setting_overrides_family_setting(made):
    experiment = made(model={"hidden": [2, 4], "width": 1.0}, tiers=[
        {"name": "a", "share": 0.5}, {"name": "b", "share": 0.5, "width": 0.5, "hidden": [2, 2]},
    ])  # fmt: skip
    whole, part = (tier.model.shapes()["blocks.1.0.weight"] for tier in experiment.fleet.tiers)
    assert (tuple(whole), tuple(part)) == ((4, 2, 3, 3), (1, 1, 3, 3))


def test_build_models_without_full_width_tier_scale_to_widest(made):
    """With no full-width tier the global model is the widest one's, and nothing is scaled in it."""
    experiment = made(tiers=[{"name": "a", "share": 0.5, "width": 0.5}, {"name": "b", "share": 0.5, "width": 0.25}])
    assert tuple(experiment.fleet.global_model.shapes()["blocks.1.0.weight"]) == (2, 1, 3, 3)
    assert dict(experiment.fleet.global_model.settings)["widest"] == 0.5


def test_build_partition_same_seed_gives_same_partition(made):
    prints = {
        made(**changes).partition.fingerprint()
        for changes in ({}, {"rounds": 9}, {"method": {"name": "standalone"}}, {"training": {"epochs": 2}})
    }
    assert len(prints) == 1
    assert made(seed=1).partition.fingerprint() not in prints


def test_build_partition_tier_label_correlation_sorts_labels(made):
    shards = {"kind": "sorted_shards", "shards_per_device": 1}
    tied = made(data__partition=shards, data__tier_label_correlation=1.0)
    labels = [tied.dataset.train.y[rows].float().mean() for rows in map(list, tied.partition.train)]
    assert labels == sorted(labels)


def test_build_partition_file_for_other_device_count_is_refused(made, tmp_path):
    rows = tuple(np.arange(10 * n, 10 * n + 10) for n in range(3))
    Partition(rows, rows).save(tmp_path / "map.json")
    partition = {"kind": "file", "path": str(tmp_path / "map.json")}
    with pytest.raises(RecipeError) as caught:
        made(data__partition=partition)
    assert caught.value.issues[0].code == "RECIPE_VALUE"
    assert "3 devices" in caught.value.issues[0].message
    assert (
        made(data__partition=partition, data__devices=3).partition.fingerprint() == Partition(rows, rows).fingerprint()
    )


def test_assemble_missing_data_raises_data_missing(made):
    with pytest.raises(DataMissing):
        made(data__dataset="mnist")
