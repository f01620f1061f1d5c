"""What only some tiers hold: where none of them is heard, nothing can be learned."""

from ..footprints.rings import rings
from .tiers import Fleet

Ring = tuple[str, ...]
"""The tiers that hold it, and nobody else does."""


def tier_rings(fleet: Fleet) -> list[Ring]:
    """For every part of the models the tiers that share it. A tier with weights outside the global model has a ring of
    its own."""
    tiers = fleet.served
    held = {ring.voters for ring in rings(fleet.whole.shapes(), [tier.footprint for tier in tiers])}
    held |= {(n,) for n, tier in enumerate(tiers) if tier.model.shapes().keys() - tier.footprint.blocks.keys()}
    return [tuple(tiers[n].name for n in holders) for holders in sorted(held)]


def ring_name(ring: Ring) -> str:
    return "+".join(ring)
