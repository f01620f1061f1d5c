"""The list of claims: what papers say that can be checked in minutes, and by which comparison. Read, never written."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated

from annotated_types import Len
from pydantic import StringConstraints, model_validator

from ..recipe.errors import recipe_error, suggest
from ..recipe.paths import TomlModel, read_toml_model
from ..recipe.schema import FILE_NAME
from ..reporting.ledger import ClaimSide, ClaimTerms, Measure, Relation
from ..settings import Count, NonNegative

LIST = Path("ledger") / "claims.toml"
SOON = ("rounds", "bytes", "gain")  # measures that need a target


class Claim(TomlModel):
    """That one side is more, less, at least or as much as the other."""

    name: Annotated[str, StringConstraints(pattern=FILE_NAME)]
    paper: str
    statement: str
    published: str  # the paper's own figures, and where they stand
    recipe: str
    this: ClaimSide
    other: ClaimSide
    measure: Measure = "last"
    relation: Relation = "more"
    test: str = "global"
    metric: str = "accuracy"
    within: NonNegative = 0.0
    baseline: ClaimSide | None = None  # what it ends with, less the margin, is the target
    margin: NonNegative = 1.0

    @model_validator(mode="after")
    def _can_be_decided(self) -> "Claim":
        if (self.measure in SOON) != (self.baseline is not None):
            raise ValueError(f"a baseline goes with {', '.join(SOON)}, and with nothing else")
        if self.measure == "gain" and not (self.this.others and self.other.others):
            raise ValueError("a gain is over another arm, so both sides need minus")
        if (self.relation == "alike") != (self.within > 0):
            raise ValueError("within goes with alike, and with nothing else")
        return self

    @property
    def terms(self) -> ClaimTerms:
        return ClaimTerms(self.measure, self.relation, self.test, self.metric, self.within)

    @property
    def arms(self) -> set[str]:
        sides = [side for side in (self.this, self.other, self.baseline) if side is not None]
        return {arm for side in sides for arm in (side.arm, *side.others)}


class ClaimList(TomlModel):
    seeds: Count = 5
    claims: Annotated[tuple[Claim, ...], Len(1)]

    @cached_property
    def by_name(self) -> Mapping[str, Claim]:
        return {claim.name: claim for claim in self.claims}

    @model_validator(mode="after")
    def _each_has_a_name_of_its_own(self) -> "ClaimList":
        if len({claim.name for claim in self.claims}) < len(self.claims):
            raise ValueError("two claims have the same name")
        return self

    def named(self, name: str) -> Claim:
        if name not in self.by_name:
            raise recipe_error("--claim", "CLAIM_NAME", f"there is no claim {name!r}", suggest(name, self.by_name))
        return self.by_name[name]

    def decided_with(self, claim: Claim) -> list[Claim]:
        """All that the same comparison decides."""
        return [other for other in self.claims if other.recipe == claim.recipe]

    def comparisons(self) -> Sequence[Claim]:
        """One claim of each comparison."""
        return list({claim.recipe: claim for claim in reversed(self.claims)}.values())[::-1]


def read_claims(recipes: Path) -> ClaimList:
    return read_toml_model(ClaimList, recipes / LIST)
