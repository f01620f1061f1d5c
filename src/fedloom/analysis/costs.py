"""The costs of a recipe per tier, computed before it runs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..engines import Compression, DryRun
from ..engines.client_data import block_size_of
from ..engines.protocol import MAX_MESSAGE_BYTES
from ..fleet import UNCOMPRESSED, Fleet, RoundContext
from ..fleet.sampling import cohort_size
from ..methods import Method
from ..models import compute_cost
from ..recipe.errors import RecipeIssue
from ..recipe.load import LoadedRecipe
from ..recipe.registries import Registries
from ..recipe.validation import instantiate
from ..runs.build import build, build_compression
from ..runs.clock import Clock
from ..runs.data import DataSpec, draw_server_rows, read_data_spec
from ..runs.effects import one_device_per_tier
from .profiling import latency_ms, training_memory


@dataclass(frozen=True)
class TierCost:
    """Costs of one device of a tier: its model, and the traffic of one round."""

    name: str
    parameters: int
    macs: int
    published_flops: int
    bytes_down: int
    bytes_up: int
    trained_parameters: int | None = None  # if some are frozen
    uncounted: tuple[str, ...] | None = None  # operations whose multiply-adds are not known
    training_memory: int | None = None  # peak bytes of all tensors, if requested
    block_memory: int | None = None  # the same of all devices that run as one network, on an accelerator
    bytes_down_compressed: int | None = None  # if the recipe compresses
    bytes_up_compressed: int | None = None
    device_seconds: float | None = None  # per round, if the recipe has the tier's speed
    latency_ms: float | None = None  # of one example on this machine, if requested
    largest_message: int = 0  # bytes of the largest message to or from a device

    @property
    def bytes_moved(self) -> int:
        """Bytes in both directions, compressed if the recipe compresses."""
        down, up = self.bytes_down_compressed, self.bytes_up_compressed
        return (self.bytes_down if down is None else down) + (self.bytes_up if up is None else up)

    def record(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None and key != "largest_message"}

    @property
    def message_problem(self) -> str:
        """Why a real device cannot get or send its messages; "" if it can."""
        if self.largest_message <= MAX_MESSAGE_BYTES:
            return ""
        size, limit = self.largest_message, MAX_MESSAGE_BYTES
        return f"a message of tier {self.name} has {size:,} bytes, more than the {limit:,} of Flower's limit"


@dataclass(frozen=True)
class ServerCost:
    """What the server's own training costs in a round."""

    macs: int  # at most
    seconds: float | None = None  # if the recipe has the server's speed

    def record(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


def check_message_sizes(loaded: LoadedRecipe, costs: Sequence[TierCost]) -> None:
    """Raise if a message of some tier is larger than Flower delivers."""
    for cost in costs:
        if cost.message_problem:
            hint = "compress it ([compression]), or give its devices a smaller model"
            raise loaded.error(RecipeIssue(("tiers",), "MESSAGE_SIZE", cost.message_problem, hint))


def tier_costs(
    loaded: LoadedRecipe, registries: Registries, folder: Path, timed: bool = False, memory: bool = False
) -> list[TierCost]:
    """Found by a dry run with one device per tier; known data sets need not be on disk."""
    data_spec = read_data_spec(loaded, registries, folder)
    fleet, method = build(loaded, registries, data_spec)
    training, compression = loaded.recipe.training, build_compression(loaded.recipe, registries)
    traffic = dry_run(loaded, method, fleet, data_spec, compression)
    is_compressed = compression is not None
    optimizer, batch = instantiate(registries.optimizers, training.optimizer)(), training.batch_size
    costs, engine = [], loaded.recipe.engine
    for tier in fleet.tiers:
        model_cost = compute_cost(tier.model)
        beside = method.trained_beside(tier.model, fleet.tier_models)
        used = sum(training_memory(one, batch, optimizer) for one in (tier.model, *beside)) if memory else None
        at_once = block_size_of(engine.devices_per_block, tier.name, tier.model)
        tier_cost = TierCost(
            tier.name, model_cost.parameters, model_cost.macs, model_cost.published_flops,
            traffic.bytes_down.get(tier.name, 0), traffic.bytes_up.get(tier.name, 0),
            model_cost.trained_parameters if model_cost.frozen_parameters else None,
            model_cost.uncounted or None,
            used,
            used * at_once if used and engine.device != "cpu" else None,
            traffic.bytes_down_compressed[tier.name] if is_compressed else None,
            traffic.bytes_up_compressed[tier.name] if is_compressed else None,
            latency_ms=latency_ms(tier.model) if timed else None,
            largest_message=traffic.largest_message.get(tier.name, 0),
        )  # fmt: skip
        seconds = _device_seconds(loaded, method, fleet, tier_cost, data_spec)
        costs.append(replace(tier_cost, device_seconds=seconds))
    return costs


def server_cost(loaded: LoadedRecipe, registries: Registries, folder: Path) -> ServerCost | None:
    """Of a full cohort whose devices have equally many examples; None if the server only averages."""
    data_spec = read_data_spec(loaded, registries, folder)
    fleet, method = build(loaded, registries, data_spec)
    devices = cohort_size(fleet, loaded.recipe.fleet.participation, 1)
    examples = [examples_per_device(loaded, data_spec)] * devices
    macs = method.server_macs(fleet.global_model, examples)
    seconds = Clock(loaded.recipe, method, {}, fleet.tier_models).server_seconds(fleet.global_model, examples)
    return ServerCost(round(macs), seconds) if macs else None


def _device_seconds(
    loaded: LoadedRecipe, method: Method, fleet: Fleet, tier_cost: TierCost, data_spec: DataSpec
) -> float | None:
    clock = Clock(loaded.recipe, method, {}, fleet.tier_models)
    if not clock.knows([tier_cost.name]):
        return None
    device = next(device for device in one_device_per_tier(fleet).devices(1) if device.tier == tier_cost.name)
    return clock.seconds(device, tier_cost.bytes_moved, examples_per_device(loaded, data_spec))


def examples_per_device(loaded: LoadedRecipe, data_spec: DataSpec) -> int:
    """Training examples of a device if they are shared out evenly."""
    data, total = loaded.recipe.data, len(data_spec.labels.train)
    examples = (total - len(draw_server_rows(loaded, total))) // data.devices
    return min(examples, data.max_examples or examples)


def dry_run(
    loaded: LoadedRecipe, method: Method, fleet: Fleet, data_spec: DataSpec, compression: Compression | None
) -> DryRun:
    """Dry-run two rounds with one device per tier; returns the second, since some methods send less in the first."""
    data, examples = loaded.recipe.data, examples_per_device(loaded, data_spec)
    total = len(data_spec.labels.train)
    public_size = 0 if data.public is None else total if data.public.source == "train_pool" else data.public.examples
    public = torch.zeros(public_size, *data_spec.stored_shape, dtype=torch.uint8) if public_size else None
    small_fleet = one_device_per_tier(fleet)
    server = method.start(small_fleet, fleet.seed)
    for number in (1, 2):
        engine = DryRun(lambda device: examples, wire=compression or UNCOMPRESSED)
        server = method.round(
            server, RoundContext(number, small_fleet.eligible_devices(number), small_fleet, engine, public=public)
        )
    return engine
