"""fedloom list: every name a recipe can use, with what can be set."""

import pytest

from fedloom.client import LR_SCHEDULES, OPTIMIZERS
from fedloom.data import DATASETS, PARTITIONS, PREPARATIONS
from fedloom.engines.compression import UP
from fedloom.methods import METHODS
from fedloom.models import MODELS
from fedloom.studies.controls import CONTROLS

TABLES = {
    "methods": METHODS,
    "models": MODELS,
    "datasets": DATASETS,
    "partitions": PARTITIONS,
    "preparations": PREPARATIONS,
    "optimizers": OPTIMIZERS,
    "lr_schedules": LR_SCHEDULES,
    "compressors": UP,
    "controls": CONTROLS,
}


@pytest.mark.parametrize("what", TABLES)
def test_json_has_an_object_with_a_name_for_each(what, fedloom, files):
    said = fedloom("list", what, "--format", "json")
    assert (said.code, said.err) == (0, "")
    assert [one["name"] for one in said.data] == list(TABLES[what])
    assert files() == {}


@pytest.mark.parametrize("what", TABLES)
def test_text_is_a_table_with_a_line_for_each(what, fedloom):
    said = fedloom("list", what)
    header, *lines = said.out.splitlines()
    assert (said.code, said.err) == (0, "")
    assert header.startswith("name ")
    assert [line.split()[0] for line in lines] == list(TABLES[what])


def test_a_method_says_what_leaves_a_device_and_what_can_be_set(fedloom):
    (heterofl,) = [one for one in fedloom("list", "methods", "--format", "json").data if one["name"] == "heterofl"]
    assert heterofl == {
        "name": "heterofl",
        "produces": "global",
        "heterogeneity": "nested",
        "uploads": "weights of the device's slice, the set of its labels",
        "client_state": "nothing",
        "settings": {
            "mask_unseen_labels": True,
            "unseen_logit": 0.0,
            "only_seen_rows": True,
            "weighting": "uniform",
        },
        "paper": "Diao, Ding & Tarokh, ICLR 2021",
    }


def test_what_must_be_set_is_said_and_what_is_handed_over_is_not_shown(fedloom):
    partitions = {one["name"]: one["settings"] for one in fedloom("list", "partitions", "--format", "json").data}
    assert partitions["label_shards"] == {"labels_per_device": "required", "dedupe": True}
    models = {one["name"]: one["settings"] for one in fedloom("list", "models", "--format", "json").data}
    assert models["convnet"] == {
        "width": 1.0, "hidden": [64, 128, 256, 512], "normalization": "static_batch", "scaler": True, "norm_widths": [],
    }  # fmt: skip


def test_a_control_is_explained(fedloom):
    controls = fedloom("list", "controls", "--format", "json").data
    assert {one["name"] for one in controls} == {"standalone", "small-for-all", "drop-the-small", "all-large"}
    assert all(one["is"].endswith(".") and len(one["is"]) > 20 for one in controls)
