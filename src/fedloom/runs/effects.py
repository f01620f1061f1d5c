"""Settings without effect: what a recipe asks for, although its method never does what the setting is about.

Nothing here knows a method by name. A round on paper, with one device per tier and no training, shows what a method
does: whether it averages updates, and what it sends.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..engines import DryRun
from ..fleet import DeviceModel, Fleet, RoundContext
from ..fleet.sampling import cohort_size
from ..fleet.tiers import tier_regions
from ..footprints import ClientUpdate, coverage_mean
from ..methods import Method
from ..recipe.errors import RecipeIssue, dotted
from ..recipe.load import LoadedRecipe
from ..recipe.registries import Registries
from ..recipe.schema import AggregationConfig, Recipe
from ..recipe.validation import instantiate
from ..tensors import Tensors
from ..wording import join_words, pluralize
from .data import DataSpec

PUBLIC_EXAMPLES = 2  # of the round on paper


@dataclass(frozen=True)
class RoundOnPaper:
    """What a method does in its rounds.

    Parameters
    ----------
    aggregates : whether it averages updates with `context.aggregate`.
    uploads : whether devices send anything.
    downloads : whether they receive anything.
    has_updates : whether they send weights that they received before, so that a change has a norm.
    aggregates_state : whether everything that it averages is a bundle of its server state.
    """

    aggregates: bool
    uploads: bool
    downloads: bool
    has_updates: bool
    aggregates_state: bool = True


def one_device_per_tier(fleet: Fleet) -> Fleet:
    """A fleet with the same tiers and one device of each."""
    shares = tuple(1 / len(fleet.tiers) for _ in fleet.tiers)
    return replace(
        fleet, shares=shares, size=len(fleet.tiers), assignment="fixed", holdout_devices=frozenset(), device_tiers=()
    )


def observe_rounds(method: Method, fleet: Fleet, data_spec: DataSpec) -> RoundOnPaper:
    """Let a method have two rounds and its last exchange, without training, and note what it does."""
    calls: list[bool] = []

    def aggregate(weights: Tensors, updates: Iterable[ClientUpdate]) -> dict[str, Tensor]:
        calls.append(any(weights is bundle for bundle in server.values()))
        return coverage_mean(weights, updates)

    small, engine = one_device_per_tier(fleet), DryRun()
    public = torch.zeros(PUBLIC_EXAMPLES, *data_spec.stored_shape, dtype=torch.uint8)
    server, has_updates = method.start(small, fleet.seed), False
    for number in (1, 2, 3):
        context = RoundContext(number, small.eligible_devices(number), small, engine, aggregate, public)
        server = method.round(server, context) if number < 3 else method.finish(server, context) or server
        has_updates |= bool(context.traffic.norms)
    sent, received = engine.bytes_up.total() > 0, engine.bytes_down.total() > 0
    return RoundOnPaper(bool(calls), sent, received, has_updates, all(calls))


def check_effects(loaded: LoadedRecipe, fleet: Fleet, method: Method, data_spec: DataSpec) -> None:
    """Raise if the recipe asks for a defense or a saving that its method would silently ignore."""
    recipe = loaded.recipe
    asked = {
        ("aggregation", "rule"): recipe.aggregation.rule != AggregationConfig().rule,
        ("aggregation", "server_optimizer"): recipe.aggregation.server_optimizer is not None,
        ("faults", "min_coverage"): recipe.faults.min_coverage > 1,
        ("compression", "uplink"): recipe.compression.uplink is not None,
        ("compression", "downlink"): recipe.compression.downlink is not None,
        ("admission", "norm"): recipe.admission.norm is not None,
    }
    if not any(asked.values()):
        return
    seen = observe_rounds(method, fleet, data_spec)
    of_other = "" if seen.aggregates_state else "averages something else than its server state"
    missing = {
        ("aggregation", "rule"): "" if seen.aggregates else "averages nothing",
        ("aggregation", "server_optimizer"): method.server_step
        or (of_other if seen.aggregates else "averages nothing"),
        ("faults", "min_coverage"): "" if seen.aggregates else "averages nothing",
        ("compression", "uplink"): "" if seen.uploads else "uploads nothing",
        ("compression", "downlink"): "" if seen.downloads else "sends nothing to devices",
        ("admission", "norm"): "" if seen.has_updates else "uploads no updates of what it sends",
    }
    issues = [
        RecipeIssue(
            key, "NO_EFFECT", f"{recipe.method.name} {missing[key]}; {dotted(key)} has no effect", "leave it out"
        )
        for key, wanted in asked.items()
        if wanted and missing[key]
    ]
    if issues:
        raise loaded.error(*issues)


def describe_idle_settings(loaded: LoadedRecipe, registries: Registries, fleet: Fleet, method: Method) -> Iterator[str]:
    """A sentence for each setting that has no effect here and does no harm either, and for what never learns."""
    recipe, name = loaded.recipe, loaded.recipe.method.name
    yield from _describe_idle_rounds(recipe, registries)
    yield from _describe_idle_weights(recipe, fleet)
    if recipe.faults.stragglers is not None and not any(tier.speed and tier.bandwidth for tier in recipe.tiers):
        yield "faults.stragglers has no effect here: no tier has a speed and a bandwidth"
    aggregation, default = recipe.aggregation, AggregationConfig()
    if recipe.data.public is not None and not method.needs_public_data and not recipe.compare.arms:  # theirs may
        kept = "; its examples are only kept from the devices" if recipe.data.public.source == "holdout" else ""
        yield f"data.public has no effect here: {name} uses no examples at the server{kept}"
    targets = method.eval_targets(method.start(fleet, fleet.seed)).values()
    if recipe.evaluation.fine_tune is not None and all(isinstance(target, DeviceModel) for target in targets):
        yield f"evaluation.fine_tune has no effect here: with {name} every device has a model of its own already"
    if recipe.evaluation.statistics and not any(tier.model.statistics() for tier in fleet.active_tiers):
        yield "evaluation.statistics has no effect here: no model has static batch norm"
    if aggregation.rule == default.rule:
        for key in ("low_coverage", "min_contributors"):
            if getattr(aggregation, key) != getattr(default, key):
                yield f"aggregation.{key} has no effect here: it belongs to a robust rule, and aggregation.rule is none"


def _describe_idle_rounds(recipe: Recipe, registries: Registries) -> Iterator[str]:
    schedule = instantiate(registries.lr_schedules, recipe.training.lr_schedule)()
    if schedule.factor(recipe.rounds) == 0:
        first = next(number for number in range(1, recipe.rounds + 1) if schedule.factor(number) == 0)
        yield (
            f"nothing is learned from round {first} of {recipe.rounds} on: training.lr_schedule makes the rate 0 there"
        )


def _describe_idle_weights(recipe: Recipe, fleet: Fleet) -> Iterator[str]:
    """Parts of the global model that never have as many updates as a rule or a quorum asks for."""
    aggregation, devices = recipe.aggregation, Counter(device.tier for device in fleet.eligible_devices(1))
    asked = {"faults.min_coverage": recipe.faults.min_coverage}
    if aggregation.rule != AggregationConfig().rule and aggregation.low_coverage == "hold":
        asked["aggregation.min_contributors"] = aggregation.min_contributors
    draws_all = recipe.fleet.sampling == "poisson"  # sometimes
    cohort = fleet.size if draws_all else cohort_size(fleet, recipe.fleet.participation, 1)
    for key, least in asked.items():
        for region in tier_regions(fleet) if fleet.assignment == "fixed" else ():
            most = min(cohort, sum(devices[tier] for tier in region))
            if most < least:
                yield (
                    f"weights that {join_words(region)} devices hold never change: a round has at most "
                    f"{pluralize(most, 'update')} of them, and {key} asks for {least}"
                )
