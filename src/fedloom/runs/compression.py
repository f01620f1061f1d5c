"""How a recipe's parcels travel, and what is refused because a codec would spoil it."""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from ..engines import Codec, Coded, InProcess, ProcessPool
from ..engines.compression import DOWN, UP
from ..fleet import Fleet, RoundContext
from ..footprints import Footprint
from ..methods import Method
from ..recipe.errors import RecipeIssue
from ..recipe.load import LoadedRecipe
from ..recipe.schema import Recipe
from ..recipe.validation import instantiate

ENTRY_BY_ENTRY = ("median", "trimmed_mean")  # rules that a few votes on an entry do not move


def build_codec(recipe: Recipe) -> Codec | None:
    """None where parcels travel as they are."""
    up, down = recipe.compression.uplink, recipe.compression.downlink
    if up is None and down is None:
        return None
    return Codec(instantiate(UP, up)() if up else None, instantiate(DOWN, down)() if down else None)


def coded(context: RoundContext, recipe: Recipe, simulation: InProcess) -> RoundContext:
    """The same turn, whose parcels travel as the recipe says. An engine that is no simulation carries them itself."""
    codec = build_codec(recipe)
    if codec is None:
        return context
    simulated = isinstance(context.engine, InProcess | ProcessPool)
    return replace(context, engine=Coded(simulation, codec) if simulated else context.engine, coding=codec)


def refuse_uncodable(loaded: LoadedRecipe, fleet: Fleet, method: Method) -> None:
    problems = list(_uncodable(loaded.recipe, fleet, method))
    if problems:
        raise loaded.error(*problems)


def _uncodable(recipe: Recipe, fleet: Fleet, method: Method) -> Iterator[RecipeIssue]:
    codec, place, why = build_codec(recipe), ("compression", "uplink"), "leave it out, or set error_feedback = false"
    if codec is None or codec.up is None or not codec.up.of_updates:
        return
    if recipe.aggregation.rule in ENTRY_BY_ENTRY:
        said = f"{recipe.aggregation.rule} goes entry by entry, and of most entries most devices would say nothing"
        yield RecipeIssue(place, "CODEC_DEFENCE", said, 'use another codec, or aggregation.rule = "default"')
    if codec.up.error_feedback and recipe.privacy.clip is not None:
        said = "what a device left out in rounds before would be in what it sends, which no figure of privacy counts"
        yield RecipeIssue(place, "PRIVACY_CODEC", said, why)
    if codec.up.error_feedback and any(_wanders(one, fleet) for one in _methods(method)):
        said = f"{recipe.method.name} gives a device other weights every round; what it left out would go to wrong ones"
        yield RecipeIssue(place, "CODEC_METHOD", said, why)


def _methods(method: Method) -> list[Method]:
    return [part.method for part in getattr(method, "parts", ())] or [method]


def _wanders(method: Method, fleet: Fleet) -> bool:
    """Whether a tier's part of the global model is another in the next round."""
    return any(
        not _same(method.aggregation_footprint(tier, fleet, 1), method.aggregation_footprint(tier, fleet, 2))
        for tier in fleet.active_tiers
    )


def _same(one: Footprint, other: Footprint) -> bool:
    def plain(footprint: Footprint) -> dict[str, list[object]]:
        return {
            name: [part.tolist() if isinstance(part, Tensor) else part for part in block]
            for name, block in footprint.blocks.items()
        }

    return plain(one) == plain(other)
