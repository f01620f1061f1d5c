"""The fleet as the server knows it: devices, tiers, client sampling, and the context of a round."""

from .device import SERVER_PREFIX, Device, Reply, Tier
from .engine import UNCOMPRESSED, Ask, ByteCounter, Channel, Engine, Exchange, Inboxes, Request, Transport, make_ask
from .eval_targets import DeviceModel, EvalTarget, ModelWeights, ServerModel, tier_slices
from .round_context import Responses, RoundContext, Traffic
from .sampling import Sampling, draw_cohort, expected_participants
from .tiers import (
    Assignment,
    Fleet,
    InvalidTier,
    count_parameters,
    device_name,
    find_nesting_problem,
    in_parts,
    make_nested_tiers,
    make_tiers,
)

__all__ = [
    "SERVER_PREFIX", "UNCOMPRESSED", "Ask", "Assignment", "ByteCounter", "Channel", "Device", "DeviceModel", "Engine",
    "EvalTarget", "Exchange", "Fleet", "Inboxes", "InvalidTier", "ModelWeights", "Reply", "Request", "Responses",
    "RoundContext", "Sampling", "ServerModel", "Tier", "Traffic", "Transport", "count_parameters", "device_name",
    "draw_cohort", "expected_participants", "find_nesting_problem", "in_parts", "make_ask", "make_nested_tiers",
    "make_tiers", "tier_slices",
]  # fmt: skip
