"""fedloom list: every name a recipe can use, with its settings."""

import pytest

from fedloom.client import LR_SCHEDULES, OPTIMIZERS
from fedloom.data import DATASETS, PARTITIONS, PREPARATIONS
from fedloom.engines.compression import UPLINK
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
    "compressors": UPLINK,
    "controls": CONTROLS,
}


@pytest.mark.parametrize("what", TABLES)
def test_list_json_has_an_object_with_a_name_each(what, fedloom, files):
    result = fedloom("list", what, "--format", "json")
    assert (result.code, result.err) == (0, "")
    assert [one["name"] for one in result.data] == list(TABLES[what])
    assert files() == {}


@pytest.mark.parametrize("what", TABLES)
def test_list_text_has_a_line_each(what, fedloom):
    result = fedloom("list", what)
    header, *lines = result.out.splitlines()
    assert (result.code, result.err) == (0, "")
    assert header.startswith("name ")
    assert [line.split()[0] for line in lines] == list(TABLES[what])


def test_list_methods_shows_uploads_and_settings(fedloom):
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


def test_list_settings_show_required_and_hide_internal_ones(fedloom):
    partitions = {one["name"]: one["settings"] for one in fedloom("list", "partitions", "--format", "json").data}
    assert partitions["label_shards"] == {"labels_per_device": "required", "dedupe": True}
    models = {one["name"]: one["settings"] for one in fedloom("list", "models", "--format", "json").data}
    assert models["convnet"] == {
        "width": 1.0, "hidden": [64, 128, 256, 512], "normalization": "static_batch", "scaler": True, "norm_widths": [],
    }  # fmt: skip


def test_list_controls_are_explained(fedloom):
    controls = fedloom("list", "controls", "--format", "json").data
    assert {one["name"] for one in controls} == {"standalone", "small-for-all", "drop-the-small", "all-large"}
    assert all(one["is"].endswith(".") and len(one["is"]) > 20 for one in controls)
