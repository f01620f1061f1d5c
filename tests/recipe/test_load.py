"""Loading recipes: defaults, overrides, errors, and the round trip through TOML."""

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.data import PARTITIONS
from fedloom.methods import METHODS
from fedloom.recipe.errors import RecipeError
from fedloom.recipe.load import dumps, load
from fedloom.recipe.registries import Registries

REGISTRY = Registries()
MINIMAL = {"rounds": 3, "tiers": [{"name": "all", "share": 1.0}], "method": {"name": "fedavg"}}


def round_trip(recipe):
    return load(tomllib.loads(dumps(recipe.document())), REGISTRY).recipe


def test_load_minimal_recipe_has_defaults():
    recipe = load(MINIMAL, REGISTRY).recipe
    assert recipe.document() == {
        "seed": 0,
        "rounds": 3,
        "data": {"dataset": "fashion-mini", "devices": 20, "partition": {"kind": "iid"}, "tier_label_correlation": 0.0},
        "fleet": {
            "participation": 1.0, "sampling": "fixed_size", "assignment": "fixed", "device_tiers": (), "eligible": (),
            "holdout_fraction": 0.0,
        },
        "model": {"family": "convnet"},
        "tiers": ({"name": "all", "share": 1.0},),
        "training": {
            "epochs": 1, "batch_size": 10, "last_batch": "keep", "shuffle": True, "optimizer": {"kind": "sgd"},
            "lr_schedule": {"kind": "constant"},
        },
        "method": {"name": "fedavg"},
        "evaluation": {
            "every": 1, "dense_last": 0.0, "tests": ("global", "local"), "per_device": "last", "batch_size": 500,
            "statistics": {}, "candidates": (),
        },
        "engine": {
            "kind": "in_process", "device": "cpu", "devices": (), "precision": "float32", "compile": False,
            "tf32": False, "deterministic": False, "kernels": "auto",
        },
        "faults": {
            "dropout": 0.0, "outages": (), "quorum": 0.0, "min_coverage": 1, "over_selection": 0.0,
            "max_failed_rounds": 5,
        },
        "start": {},
        "task": {},
        "checkpoints": {"every": "auto"},
        "aggregation": {"rule": "none", "low_coverage": "hold", "min_contributors": 3},
        "privacy": {"acknowledge_feature_sharing": False, "delta": 1e-5, "accountant": "rdp"},
        "admission": {"max_examples": 10**9},
        "compression": {},
    }  # fmt: skip


def test_load_written_recipe_round_trips(document):
    recipe = load(
        document(
            data__partition={"kind": "dirichlet", "alpha": 0.3, "balanced": False},
            data__preparation="plain",
            data__tier_label_correlation=0.5,
            fleet={"participation": 0.5, "assignment": "redrawn", "eligible": ["small"]},
            model={"family": "preresnet", "hidden": [2, 4], "blocks": [1, 1], "scaler": False},
            training={
                "optimizer": {"kind": "adam", "lr": 1e-3, "clip_norm": 1.0},
                "lr_schedule": {"kind": "milestones", "rounds": [10, 20], "factor_each": 0.5},
            },
            method={"name": "heterofl", "unseen_logit": -math.inf},
            evaluation={"tests": ["local"], "statistics": {"query": "per_device", "max_batches": 3}},
            start={"from": 'runs/é \\ "earlier"'},
        ),
        REGISTRY,
    ).recipe
    assert round_trip(recipe) == recipe
    assert round_trip(recipe).start.source == 'runs/é \\ "earlier"'
    assert round_trip(recipe).method.settings == {"unseen_logit": -math.inf}


def narrow(value):
    """The same with whole numbers of at most 64 bits, as a recipe must have them."""
    if isinstance(value, Mapping):
        return {key: narrow(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(narrow(item) for item in value)
    return min(value, 2**63 - 1) if type(value) is int else value


@pytest.mark.parametrize("name", METHODS)
@given(data=st.data())
def test_load_method_settings_round_trip(name, data):
    hints = get_type_hints(METHODS[name], include_extras=True)
    drawn = {
        field.name: data.draw(st.from_type(hints[field.name]), label=field.name)
        for field in dataclasses.fields(METHODS[name])
        if field.name != "parts"  # tables of their own, which stand for methods of their own
    }
    drawn = {key: 0.0 if isinstance(value, float) and math.isnan(value) else value for key, value in drawn.items()}
    drawn = {
        key: value for key, value in drawn.items() if value is not None
    }  # None is expressed by leaving the key out
    drawn = {key: narrow(value) for key, value in drawn.items()}
    recipe = load({**MINIMAL, "method": {"name": name, **drawn}}, REGISTRY).recipe
    assert round_trip(recipe) == recipe
    assert METHODS[name](**round_trip(recipe).method.settings) == METHODS[name](**drawn)


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_frozen_and_have_defaults(name):
    method = METHODS[name]()
    assert dataclasses.is_dataclass(method)
    assert type(method).__dataclass_params__.frozen
    assert load({**MINIMAL, "method": {"name": name}}, REGISTRY).recipe.method.name == name


def test_recipe_assignment_is_refused(document):
    recipe = load(document(), REGISTRY).recipe
    with pytest.raises(ValueError, match="frozen"):
        recipe.rounds = 5
    with pytest.raises(ValueError, match="frozen"):
        recipe.training.epochs = 5


def test_load_mapping_is_not_modified(document):
    mapping = document()
    load(mapping, REGISTRY, ["tiers.0.width=0.75", "training.epochs=2", "data.partition={kind='iid'}"])
    assert mapping == document()


def test_load_file_and_mapping_are_equal(document, tmp_path):
    path = tmp_path / "my.toml"
    path.write_text(dumps(document()))
    assert load(path, REGISTRY).recipe == load(str(path), REGISTRY).recipe == load(document(), REGISTRY).recipe


@pytest.mark.parametrize(
    ("change", "read"),
    [
        ("rounds=7", lambda recipe: recipe.rounds == 7),
        (" rounds = 7 ", lambda recipe: recipe.rounds == 7),
        ("data.dataset=mnist", lambda recipe: recipe.data.dataset == "mnist"),
        ('data.dataset="mnist"', lambda recipe: recipe.data.dataset == "mnist"),
        ("tiers.1.width=0.25", lambda recipe: recipe.tiers[1].settings == {"width": 0.25}),
        ("tiers[1].width=0.25", lambda recipe: recipe.tiers[1].settings == {"width": 0.25}),
        ("training.optimizer={kind='sgd',momentum=0.9}", lambda recipe: recipe.training.optimizer["momentum"] == 0.9),
        ("method.unseen_logit=-inf", lambda recipe: recipe.method.settings == {"unseen_logit": -math.inf}),
        ("model.scaler=false", lambda recipe: recipe.model.settings["scaler"] is False),
        ("model.hidden=[8, 8]", lambda recipe: recipe.model.settings["hidden"] == (8, 8)),
        ("start.from=a=b", lambda recipe: recipe.start.source == "a=b"),
        ("fleet.participation=0.5", lambda recipe: recipe.fleet.participation == 0.5),
    ],
)
def test_load_override_beats_document(change, read, document):
    loaded = load(document(), REGISTRY, [change])
    assert read(loaded.recipe)
    assert round_trip(loaded.recipe) == loaded.recipe


def test_load_integer_is_accepted_as_float(document):
    tiers = [{"name": "all", "share": 1, "width": 1}]
    recipe = load(document(tiers=tiers, method={"name": "heterofl", "unseen_logit": -3}), REGISTRY).recipe
    assert (recipe.tiers[0].share, recipe.tiers[0].settings, recipe.method.settings) == (
        1.0, {"width": 1}, {"unseen_logit": -3},
    )  # fmt: skip
    assert round_trip(recipe) == recipe


def test_load_overrides_apply_in_order(document):
    changes = ["rounds=5", "rounds=6", "training={epochs=9}", "training.batch_size=3"]
    recipe = load(document(), REGISTRY, changes).recipe
    assert (recipe.rounds, recipe.training.epochs, recipe.training.batch_size) == (6, 9, 3)


ODD_VALUES = [3, -1, 2.5, True, "", "x", [], [1], ["x"], [[1]], {}, {"a": 1}, [{"a": 1}], math.inf, math.nan, 10**30]
KEYS = [
    "seed", "rounds", "data", "data.dataset", "data.devices", "data.partition", "data.partition.kind",
    "data.preparation", "data.tier_label_correlation", "data.other", "fleet", "fleet.participation", "fleet.assignment",
    "fleet.eligible", "fleet.other", "model", "model.family", "model.hidden", "model.normalization", "model.other",
    "tiers", "tiers.0", "tiers.0.name", "tiers.0.share", "tiers.0.width", "tiers.0.other", "training",
    "training.epochs", "training.batch_size", "training.last_batch", "training.optimizer", "training.optimizer.kind",
    "training.lr_schedule", "training.lr_schedule.kind", "method", "method.name", "method.unseen_logit",
    "method.weighting", "method.other", "evaluation", "evaluation.every", "evaluation.tests", "evaluation.per_device",
    "evaluation.batch_size", "evaluation.statistics", "evaluation.statistics.query", "engine", "engine.kind",
    "engine.devices_per_block", "start", "start.from", "compare", "compare.arms", "compare.arms.a", "compare.candidate",
    "compare.baseline", "compare.margin", "compare.other", "other",
]  # fmt: skip


def put(document, place, value):
    *above, last = [int(key) if key.isdigit() else key for key in place.split(".")]
    for key in above:
        document = document[key] if isinstance(key, int) else document.setdefault(key, {})
    document[last] = value


@pytest.mark.parametrize("place", KEYS)
def test_load_arbitrary_value_is_valid_or_recipe_error(place, document):
    """Any other exception would be reported as a bug."""
    for value in ODD_VALUES:
        odd = document()
        put(odd, place, value)
        try:
            recipe = load(odd, REGISTRY).recipe
        except RecipeError as error:
            assert error.issues, value
        else:
            assert round_trip(recipe).rounds == recipe.rounds, value


@pytest.mark.parametrize("name", PARTITIONS)
def test_load_every_partition_round_trips(name, document):
    options = {"label_shards": {"labels_per_device": 5}, "sorted_shards": {"shards_per_device": 2}, "iid": {},
               "own": {}, "rows": {}, "natural": {}, "pathological": {"labels_per_device": 2},
               "file": {"path": "map.json"}}.get(name, {"alpha": 1.0})  # fmt: skip
    recipe = load(document(data__partition={"kind": name, **options}), REGISTRY).recipe
    assert round_trip(recipe).data.partition == {"kind": name, **options}


def test_load_issue_is_reported_once(document):
    with pytest.raises(RecipeError) as caught:
        load(document(rounds=0, method={"name": "hetrofl"}), REGISTRY)
    assert [problem.key_path for problem in caught.value.issues] == [("rounds",), ("method", "name")]


def test_load_mapping_issue_has_source_recipe(document):
    with pytest.raises(RecipeError, match=r"^recipe  rounds = 0\n  error RECIPE_RANGE: "):
        load(document(rounds=0), REGISTRY)


ARMS = {"arms": {"other": ["method.name=fedprox"]}}


def test_document_compare_section_is_left_out(document):
    loaded = load(document(compare={**ARMS, "baseline": "other", "margin": 2}), REGISTRY)
    assert loaded.recipe.compare.margin == 2
    assert "compare" not in loaded.recipe.document()


@pytest.mark.parametrize(
    ("compare", "key_path", "message"),
    [
        ({**ARMS, "baseline": "othr"}, ("compare", "baseline"), "there are: other"),
        ({"baseline": "other"}, ("compare", "baseline"), "there are: none"),
        ({"arms": {"other": ["method"]}}, ("compare", "arms", "other", 0), "not of the form key=value"),
        ({"arms": {"other": ["=3"]}}, ("compare", "arms", "other", 0), "not of the form key=value"),
        ({"arms": {"other": []}}, ("compare", "arms", "other"), "needs at least 1"),
        ({"arms": {"a/b": ["rounds=2"]}}, ("compare", "arms"), "must consist of letters"),
        ({"arms": {"heterofl": ["rounds=2"]}}, ("compare",), "name this one by what it changes"),
        ({"basline": "other"}, ("compare", "basline"), "there is no key"),
        ({"margin": -1.0}, ("compare", "margin"), "margin must be >= 0"),
    ],
)
def test_load_invalid_compare_section_is_refused(compare, key_path, message, document):
    with pytest.raises(RecipeError) as caught:
        load(document(compare=compare), REGISTRY)
    (issue,) = caught.value.issues
    assert issue.key_path == key_path
    assert message in issue.message


def test_set_setting_of_a_default_table_changes_that_default(document):
    """Without a table in the recipe, the setting belongs to the default optimizer, partition, schedule and loss."""
    plain = {key: value for key, value in document().items() if key not in ("training",)}
    recipe = load(plain, Registries(), ["training.optimizer.lr=0.5", "training.loss.label_smoothing=0.1"]).recipe
    assert recipe.training.optimizer == {"kind": "sgd", "lr": 0.5}
    assert recipe.training.loss == {"kind": "cross_entropy", "label_smoothing": 0.1}


@pytest.mark.parametrize("rounds", [0, 1_000_001, 10**12])
def test_load_impossible_number_of_rounds_is_refused(rounds, document):
    with pytest.raises(RecipeError) as caught:
        load({**document(), "rounds": rounds}, Registries())
    assert [(issue.key_path, issue.code) for issue in caught.value.issues] == [(("rounds",), "RECIPE_RANGE")]


def test_load_tier_name_beyond_ascii_is_refused_with_the_rule(document):
    with pytest.raises(RecipeError, match="letters from a to z"):
        load({**document(), "tiers": [{"name": "groß", "share": 1.0}]}, Registries())
