"""How a recipe's parcels travel, and what is refused because a compression would spoil it."""

from collections.abc import Iterator

from torch import Tensor

from ..engines import Compression
from ..engines.compression import DOWNLINK, UPLINK
from ..fleet import Fleet
from ..footprints import Footprint
from ..methods import Method
from ..recipe.errors import RecipeIssue
from ..recipe.load import LoadedRecipe
from ..recipe.schema import Recipe
from ..recipe.validation import instantiate

ENTRY_BY_ENTRY = ("median", "trimmed_mean")  # rules that a few votes on an entry do not move


def build_compression(recipe: Recipe) -> Compression | None:
    """None where parcels travel as they are."""
    uplink, downlink = recipe.compression.uplink, recipe.compression.downlink
    if uplink is None and downlink is None:
        return None
    return Compression(
        instantiate(UPLINK, uplink)() if uplink else None, instantiate(DOWNLINK, downlink)() if downlink else None
    )


def check_compression(loaded: LoadedRecipe, fleet: Fleet, method: Method) -> None:
    problems = list(_incompressible(loaded.recipe, fleet, method))
    if problems:
        raise loaded.error(*problems)


def _incompressible(recipe: Recipe, fleet: Fleet, method: Method) -> Iterator[RecipeIssue]:
    compression, place, why = (
        build_compression(recipe),
        ("compression", "uplink"),
        "leave it out, or set error_feedback = false",
    )
    if compression is None or compression.uplink is None or not compression.uplink.of_updates:
        return
    if recipe.aggregation.rule in ENTRY_BY_ENTRY:
        said = f"{recipe.aggregation.rule} goes entry by entry, and of most entries most devices would say nothing"
        yield RecipeIssue(place, "CODEC_DEFENCE", said, 'use another compression, or aggregation.rule = "default"')
    if compression.uplink.error_feedback and recipe.privacy.clip is not None:
        said = "what a device left out in rounds before would be in what it sends, which no figure of privacy counts"
        yield RecipeIssue(place, "PRIVACY_CODEC", said, why)
    if compression.uplink.error_feedback and any(_wanders(one, fleet) for one in _methods(method)):
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
