"""The arms and controls of a comparison."""

import pytest

from fedloom.recipe.errors import RecipeError
from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries
from fedloom.reporting import ServedModel
from fedloom.runs.build import assemble
from fedloom.studies.controls import CONTROLS, build_arms, served_models, supported_methods


@pytest.fixture
def prepared(document, tmp_path):
    """A recipe and its fleet of three tiers, not in order of size."""

    def prepare(**changes):
        tiers = [
            {"name": "medium", "share": 0.25, "width": 0.75},
            {"name": "small", "share": 0.5, "width": 0.25},
            {"name": "large", "share": 0.25, "width": 1.0},
        ]
        loaded = load(document(tiers=tiers, model__hidden=[4, 4], **changes), Registries())
        return loaded, assemble(loaded, Registries(), tmp_path).fleet

    return prepare


def control_recipe(prepared, name, **changes):
    loaded, fleet = prepared(**changes)
    return build_arms(loaded, Registries(), fleet, [name])[name].recipe


def test_build_arms_puts_recipe_first(prepared):
    loaded, fleet = prepared()
    arms = build_arms(loaded, Registries(), fleet, list(CONTROLS))
    assert list(arms) == ["heterofl", "standalone", "small-for-all", "drop-the-small", "all-large"]
    assert arms["heterofl"] is loaded


def test_controls_start_from_the_recipe_with_their_changes(prepared):
    changes = ["model={family='mlp', hidden=[6, 5]}", "training.optimizer.lr=0.3"]
    loaded, fleet = prepared(compare__control_changes=changes)
    arms = build_arms(loaded, Registries(), fleet, list(CONTROLS))
    for name in CONTROLS:
        recipe = arms[name].recipe
        assert (recipe.model.family, recipe.training.optimizer["lr"]) == ("mlp", 0.3)
    assert arms["heterofl"].recipe.model.family == "convnet"
    assert [tier.name for tier in arms["small-for-all"].recipe.tiers] == ["small"]


@pytest.mark.parametrize(
    ("change", "code"),
    [("model={family='none'}", "RECIPE_NAME"), ("rounds=7", "ARM_DIFFERS"), ("data.devices=3", "ARM_DIFFERS")],
)
def test_control_changes_that_cannot_be_are_named_at_their_key(prepared, change, code):
    loaded, fleet = prepared(compare__control_changes=[change])
    with pytest.raises(RecipeError) as caught:
        build_arms(loaded, Registries(), fleet, ["small-for-all"])
    assert caught.value.issues[0].key_path == ("compare", "control_changes")
    assert caught.value.issues[0].code == code


REDRAWN = {"assignment": "redrawn", "participation": 0.5, "eligible": ["small", "medium"]}


FOREIGN_TIERS = [
    {"name": "maps", "share": 0.5, "hidden": [4, 4]},
    {"name": "layers", "share": 0.5, "family": "mlp", "hidden": [8, 4]},
]


def test_supported_methods_on_unrelated_nets_names_all_others_with_a_reason(document, tmp_path):
    registries = Registries()
    supported, left_out = supported_methods(load(document(tiers=FOREIGN_TIERS), registries), registries, tmp_path)
    assert {*supported, *left_out} == set(registries.methods) and not left_out.keys() & set(supported)
    assert {"standalone", "fd", "fedproto", "fedtgp", "fedgh", "fml", "fedkd"} <= set(supported)
    nested = left_out["heterofl"]
    assert nested.startswith("every tier must have a part of the largest tier's net, but that is of family 'mlp'")
    assert nested.endswith("and tier 'maps' has one of 'convnet'")
    others = ("fedrolex", "depthfl", "scalefl", "inclusivefl", "scaffold", "feddyn", "fedrep")
    assert all(left_out[name] == nested for name in others)
    for name in ("fedavg", "fedprox", "fiarse", "ditto"):
        assert left_out[name] == "gives every device the same model, but the tiers differ"
    assert left_out["mixed"] == "no part of method.parts is for the tier 'maps'"


def test_standalone_keeps_tiers_and_fixes_assignment(prepared):
    recipe = control_recipe(prepared, "standalone", fleet=REDRAWN, method={"name": "heterofl", "unseen_logit": -1.0})
    assert (recipe.method.name, recipe.method.settings) == ("standalone", {})
    assert recipe.fleet.assignment == "fixed"
    assert recipe.fleet.participation == 0.5
    assert [tier.name for tier in recipe.tiers] == ["medium", "small", "large"]


@pytest.mark.parametrize(("name", "tier", "width"), [("small-for-all", "small", 0.25), ("all-large", "large", 1.0)])
def test_one_tier_controls_keep_one_tier(name, tier, width, prepared):
    recipe = control_recipe(prepared, name, fleet=REDRAWN)
    (kept,) = recipe.tiers
    assert (kept.name, kept.share, kept.settings) == (tier, 1.0, {"width": width})
    assert (recipe.fleet.assignment, recipe.fleet.eligible, recipe.fleet.participation) == ("fixed", (), 0.5)
    assert recipe.method.name == "heterofl"


def test_drop_the_small_changes_only_eligible_tiers(prepared):
    loaded, _ = prepared()
    recipe = control_recipe(prepared, "drop-the-small")
    assert recipe.fleet.eligible == ("large",)
    assert recipe.document() == {
        **loaded.recipe.document(),
        "fleet": {**loaded.recipe.document()["fleet"], "eligible": ("large",)},
    }


@pytest.mark.parametrize("name", CONTROLS)
def test_controls_can_be_assembled(name, prepared, tmp_path):
    loaded, fleet = prepared(fleet=REDRAWN)
    control = build_arms(loaded, Registries(), fleet, [name])[name]
    experiment = assemble(control, Registries(), tmp_path)
    assert experiment.partition.fingerprint() == assemble(loaded, Registries(), tmp_path).partition.fingerprint()


def test_build_arms_with_one_tier_has_only_standalone(document, tmp_path):
    loaded = load(document(tiers=[{"name": "all", "share": 1.0}]), Registries())
    fleet = assemble(loaded, Registries(), tmp_path).fleet
    assert list(build_arms(loaded, Registries(), fleet, list(CONTROLS))) == ["heterofl", "standalone"]


def test_build_arms_with_equally_large_tiers_has_only_standalone(document, tmp_path):
    tiers = [{"name": "a", "share": 0.5}, {"name": "b", "share": 0.5}]
    method = {"name": "fiarse", "sizes": {"a": 1.0, "b": 0.25}}
    loaded = load(document(tiers=tiers, method=method), Registries())
    fleet = assemble(loaded, Registries(), tmp_path).fleet
    assert list(build_arms(loaded, Registries(), fleet, list(CONTROLS))) == ["fiarse", "standalone"]


def test_build_arms_unknown_control_is_refused(prepared):
    loaded, fleet = prepared()
    with pytest.raises(RecipeError, match="CONTROL_NAME") as caught:
        build_arms(loaded, Registries(), fleet, ["standalon"])
    assert caught.value.issues[0].hint == "did you mean 'standalone'?"


@pytest.mark.parametrize(
    ("name", "models", "can_run_each"),
    [
        ("heterofl", ["medium", "small", "large"], [True, True, True]),
        ("standalone", ["medium", "small", "large"], [True, True, True]),
        ("small-for-all", ["small", "small", "small"], [True, True, True]),
        ("drop-the-small", ["large", "large", "large"], [False, False, True]),
        ("all-large", ["large", "large", "large"], [False, False, True]),
    ],
)
def test_served_models_by_control(name, models, can_run_each, prepared):
    _, fleet = prepared()
    assert served_models(name, fleet, fleet) == {
        tier: ServedModel(model, can_run)
        for tier, model, can_run in zip(["medium", "small", "large"], models, can_run_each, strict=True)
    }


def beside(**compare):
    return {"compare": {"arms": {"other": ["method={name='decouple'}"]}, **compare}}


def test_build_arms_puts_recipe_arms_before_controls(prepared):
    loaded, fleet = prepared(**beside())
    arms = build_arms(loaded, Registries(), fleet, ["standalone"])
    assert list(arms) == ["heterofl", "other", "standalone"]
    assert arms["other"].recipe.method.name == "decouple"


def test_build_arms_applies_changes_and_drops_compare_section(prepared):
    loaded, fleet = prepared(**beside(baseline="other"))
    arm = build_arms(loaded, Registries(), fleet, [])["other"].recipe
    assert arm.document() == {**loaded.recipe.document(), "method": {"name": "decouple"}}
    assert (arm.compare.arms, arm.compare.baseline) == ({}, None)


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ("method.name=decoupel", "RECIPE_NAME", "method.name: there is no method of that name"),
        ("training.epoch=2", "RECIPE_KEY", "training.epoch: there is no key 'epoch' here"),
        ("tiers.9.width=1.0", "SET_PLACE", "there is no key tiers.9.width in the recipe"),
        ("seed=1", "ARM_DIFFERS", "an arm must have the recipe's seed"),
        ("evaluation.tests=['global']", "ARM_DIFFERS", "an arm must have the recipe's seed"),
        ("data.devices=6", "ARM_DIFFERS", "an arm must have the recipe's seed"),
        ("tiers.0.name=tiny", "ARM_DIFFERS", "an arm must have the recipe's seed"),
    ],
)
def test_build_arms_reports_errors_at_the_arm(change, code, message, prepared):
    loaded, fleet = prepared(compare={"arms": {"other": [change]}})
    with pytest.raises(RecipeError) as caught:
        build_arms(loaded, Registries(), fleet, [])
    (problem,) = caught.value.issues
    assert (problem.key_path, problem.code) == (("compare", "arms", "other"), code)
    assert problem.message.startswith(message)


def test_build_arms_allows_other_lengths_and_evaluation_intervals(prepared):
    loaded, fleet = prepared(compare={"arms": {"longer": ["rounds=7", "evaluation.every=3"]}})
    arm = build_arms(loaded, Registries(), fleet, [])["longer"].recipe
    assert (arm.rounds, arm.evaluation.every) == (7, 3) != (loaded.recipe.rounds, loaded.recipe.evaluation.every)


def test_build_arms_refuses_names_of_controls(prepared):
    loaded, fleet = prepared(compare={"arms": {"all-large": ["method.name=decouple"]}})
    with pytest.raises(RecipeError, match="ARM_NAME"):
        build_arms(loaded, Registries(), fleet, [])


def test_build_arms_file_named_like_the_method_is_refused_with_the_reason(prepared):
    loaded, fleet = prepared()
    with pytest.raises(RecipeError) as caught:
        build_arms(loaded, Registries(), fleet, [], {"heterofl": loaded})
    (problem,) = caught.value.issues
    assert problem.message == "there is an arm 'heterofl' already: the recipe itself, named after its method"
    assert problem.hint == "give the file another name"


def test_served_models_of_untrained_tiers_are_the_largest_trained(prepared):
    """A device cannot run a model larger than that of its own tier."""
    _, fleet = prepared()
    arms = served_models("mine", fleet, fleet.restrict_tiers(["medium"]))
    assert arms == {
        "large": ServedModel("medium", True),
        "medium": ServedModel("medium", True),
        "small": ServedModel("medium", False),
    }
