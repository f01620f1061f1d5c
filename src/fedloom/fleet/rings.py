"""What only some tiers hold: where none of them is heard, nothing can be learned."""

import torch

from ..footprints.voices import voices
from .tiers import Fleet

Ring = tuple[str, ...]
"""The tiers that hold it, and nobody else does."""


def tier_rings(fleet: Fleet) -> list[Ring]:
    """For every part of the models the tiers that share it. A tier with weights outside the global model has a ring of
    its own."""
    tiers = fleet.served
    held = voices(fleet.whole.shapes(), [(tier.footprint, 1 << number) for number, tier in enumerate(tiers)])
    masks = {int(mask) for tensor in held.values() for mask in torch.unique(tensor)} - {0}
    masks |= {1 << n for n, tier in enumerate(tiers) if tier.model.shapes().keys() - tier.footprint.blocks.keys()}
    return [tuple(t.name for n, t in enumerate(tiers) if mask >> n & 1) for mask in sorted(masks)]


def ring_name(ring: Ring) -> str:
    return "+".join(ring)
