"""fedloom list: every name a recipe can use, with its settings."""

import pytest

from fedloom.recipe.registries import KINDS, Registries
from fedloom.studies.controls import CONTROLS

TABLES = {**{kind: getattr(Registries(), kind) for kind in KINDS}, "controls": CONTROLS}


@pytest.mark.parametrize("what", TABLES)
def test_list_json_has_an_object_with_a_name_each(what, fedloom, files):
    result = fedloom("list", what, "--format", "json")
    assert (result.code, result.err) == (0, "")
    assert [one["name"] for one in result.data] == list(TABLES[what])
    assert files() == {}


@pytest.mark.parametrize("what", TABLES)
def test_list_text_fits_eighty_columns_and_explains_each_name(what, fedloom, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = fedloom("list", what)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert max(map(len, lines)) <= 80
    entries = [line for line in lines if not line.startswith(" ")]
    assert [line.split()[0] for line in entries] == list(TABLES[what])
    assert all(len(line.split()) > 2 for line in entries), [line for line in entries if len(line.split()) <= 2]


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, table in TABLES.items() for name in table])
def test_list_name_shows_every_setting_with_its_default(kind, name, fedloom, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result, data = fedloom("list", kind, name), fedloom("list", kind, name, "--format", "json").data
    assert result.code == 0 and data["name"] == name
    assert max(map(len, result.out.splitlines())) <= 80
    for setting in data["settings"]:
        assert f"  {setting} = " in result.out


def test_list_unknown_name_is_refused_with_a_suggestion(fedloom):
    result = fedloom("list", "methods", "heterofll")
    assert result.code == 4 and "heterofl" in result.err


def test_list_methods_shows_uploads_and_settings(fedloom):
    (heterofl,) = [one for one in fedloom("list", "methods", "--format", "json").data if one["name"] == "heterofl"]
    assert heterofl == {
        "name": "heterofl",
        "summary": heterofl["summary"],
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
        "head": None, "depth": None, "exit_after": None,
    }  # fmt: skip


def test_list_controls_are_explained(fedloom):
    controls = fedloom("list", "controls", "--format", "json").data
    assert {one["name"] for one in controls} == {"standalone", "small-for-all", "drop-the-small", "all-large"}
    assert all(one["summary"].endswith(".") and len(one["summary"]) > 20 for one in controls)
