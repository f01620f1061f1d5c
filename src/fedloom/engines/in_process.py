"""Simulate devices in this process: a request is cut into blocks of devices that run as one network.

Which devices share a block depends on the recipe and the devices asked, never on time or the machine. Devices of
several experiments share one where that changes no bit. An `Executor` runs the blocks, here or in other processes.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from ..client import (
    Batch,
    Client,
    ClientResult,
    DevicePlan,
    Loss,
    LRSchedule,
    Optimizer,
    Schedule,
    Task,
    UnequalNumbersError,
    default_loss,
    draw_plan,
    dummy_loss,
    gradient,
    join_optimizers,
    join_tasks,
    joining_key,
    merge_plans,
    optimizer_at,
)
from ..fleet import Channel, Device, Engine, Fleet, Reply, Request
from ..models import Model, StepSeeds
from ..models.lanes import filled
from ..placement import Compute, enter, leave, resident
from ..registry import Registry
from ..seeds import PLAN, generator, number
from ..tensors import Parcel, combine, join, layout, split
from .client_data import ClientData, DevicesPerBlock, block_size, pad_indices
from .client_state import ClientStateStore
from .gate import Gate
from .task_ref import FindTask

logger = logging.getLogger(__name__)


@dataclass
class InProcess:
    """The engine that simulates devices in this process: their data, their state, and how they train.

    Parameters
    ----------
    client_data : what each device holds.
    client_states : what each device keeps from round to round.
    schedule : batch size and epochs.
    optimizer : the optimizer of every device.
    lr_schedule : the schedule of its learning rate.
    seed : the seed of the run.
    loss : of outputs and targets; None: that of the data set's task.
    devices_per_block : how many devices run as one network: in every tier, by tier, or by a rule (None).
    gate : the gate that replies pass.
    executor : runs blocks of devices, here or in other processes.
    compute : the torch device that blocks run on, and how they are computed there.
    block_limits : how many devices at a time fit into memory, by tier and task, as far as this process found out.
    noted_limits : the same of all worker processes; each is logged once and recorded with the run.
    """

    client_data: ClientData
    client_states: ClientStateStore
    schedule: Schedule
    optimizer: Optimizer
    lr_schedule: LRSchedule
    seed: int
    loss: Loss | None = None
    devices_per_block: DevicesPerBlock = None
    gate: Gate = field(default_factory=Gate)
    executor: "Executor" = field(default_factory=lambda: InlineExecutor())
    compute: Compute = field(default_factory=Compute)
    block_limits: dict[tuple[str, str], int] = field(default_factory=dict)
    noted_limits: dict[tuple[str, str], int] = field(default_factory=dict)

    def ask(self, request: Request) -> Iterator[Reply]:
        """Run the request and return the replies that pass the gate.

        Parameters
        ----------
        request : the task, and what each device receives.
        """
        channel = Channel(request)
        job = Job(self, replace(request, inboxes=channel.deliver(request.inboxes)))
        for reply in self.gate.receive(request, channel, self._replies(job)):
            self.client_states.stage(reply)
            yield replace(reply, state=None, residual=None)

    def commit(self, round_number: int) -> None:
        """The round succeeded: keep the new states of its devices.

        Parameters
        ----------
        round_number : the round.
        """
        self.client_states.commit()

    def close(self) -> None:
        """Stop worker processes and remove files."""
        self.executor.close()
        self.client_states.close()

    def plan(self, request: Request, device: Device) -> DevicePlan:
        """The batches of a device: a pure function of seed, round, stream, repeat and device.

        Parameters
        ----------
        request : the request.
        device : the device.
        """
        purpose = (self.seed, PLAN, request.round_number, request.task.stream, request.repeat)
        draw, data = generator(*purpose, device.name), self.client_data.dataset
        schedule = request.task.schedule or self.schedule
        rows = self.client_data.rows(device)
        return draw_plan(rows, schedule, data.train, data.preparation, draw, number(*purpose)).part(*device.part)

    def _replies(self, job: "Job") -> Iterator[Reply]:
        for block, result in self.executor.run(job):
            if result.largest_part:
                self._note_limit(block, result.largest_part)
            for index, device in block.devices_of(job):
                state = None if result.state is None else split(result.state, index)
                yield Reply(device, self.client_data.count(device), split(result.upload, index), state)

    def _note_limit(self, block: "Block", devices: int) -> None:
        """A block did not fit into memory and ran in parts of so many devices: say so, once."""
        key, tier = (block.members[0].device.tier, block.task.name), block.members[0].device.tier
        if key in self.noted_limits:
            return
        self.noted_limits[key] = devices
        logger.warning(
            "%s of tier %s: %d devices did not fit into the memory of %s at once; they run %d at a time",
            block.task.name, tier, len(block.members), self.compute.device, devices,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Job:
    """A request to one engine, with inboxes as they reached the devices."""

    engine: InProcess
    request: Request

    @property
    def task(self) -> Task:
        return self.request.task

    @property
    def optimizer(self) -> Optimizer:
        return optimizer_at(self.engine.optimizer, self.engine.lr_schedule, self.request.round_number)

    def batch_key(self) -> Hashable:
        """Jobs of equal key can share blocks."""
        task, engine = self.task, self.engine
        # the numbers of a method do not cross to an accelerator
        key = (task.joining_key if engine.compute.is_cpu else task.batch_key) or id(self)
        numbers = joining_key(self.optimizer)
        return key, task.schedule, numbers, engine.loss, id(engine.client_data.dataset), engine.compute


@dataclass(frozen=True)
class BlockMember:
    """A device in a block, and its batches."""

    job: Job
    device: Device
    plan: DevicePlan

    def block_size(self) -> int:
        return block_size(self.job.engine.devices_per_block, self.device)


@dataclass(frozen=True, eq=False)
class Block:
    """A task for devices that run as one network, with their inboxes and states stacked."""

    members: list[BlockMember]  # the last may be repeated, to fill the block
    devices: int  # members without those repetitions
    inbox: Parcel
    state: Parcel

    @property
    def task(self) -> Task:
        return self.members[0].job.task

    @property
    def model(self) -> Model:
        return self.members[0].device.model

    @property
    def visits(self) -> int:
        """Examples that all members go through."""
        return sum(len(member.plan.rows) for member in self.members)

    def devices_of(self, job: Job) -> Iterator[tuple[int, Device]]:
        """The devices of one job, with their index in the block."""
        for index, member in enumerate(self.members[: self.devices]):
            if member.job is job:
                yield index, member.device


class Executor(Protocol):
    """Runs the blocks of jobs."""

    def register(self, simulation: "WorkerContext") -> None:
        """Make an experiment known whose jobs will be run."""

    def run(self, job: Job) -> "Iterable[tuple[Block, BlockResult]]": ...

    def clock(self) -> float:
        """Seconds that the calling experiment has taken since some moment, without those of others beside it."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class WorkerContext:
    """What another process needs to run the blocks of an experiment.

    Parameters
    ----------
    engine : the engine of the experiment.
    fleet : its fleet.
    find_task : finds a task by its reference.
    """

    engine: InProcess
    fleet: Fleet
    find_task: FindTask


class InlineExecutor:
    """Runs blocks one after the other in this process."""

    def register(self, simulation: WorkerContext) -> None:
        pass

    def run(self, job: Job) -> "Iterator[tuple[Block, BlockResult]]":
        for block in make_blocks([job]):
            yield block, run_block(block)

    def clock(self) -> float:
        """Seconds since some moment."""
        return time.perf_counter()

    def close(self) -> None:
        pass


def make_blocks(jobs: Sequence[Job]) -> list[Block]:
    """Cut jobs into blocks: same task, model, layout of parcels and shape of plan; the longest plans first.

    Devices of several tiers share a block if these have the same model. Devices with batches of the same sizes are
    neighbors, so that they take all steps together.
    """
    alike: defaultdict[Hashable, list[tuple[BlockMember, Parcel]]] = defaultdict(list)
    for job in jobs:
        batch_key, engine = job.batch_key(), job.engine
        for device, inbox in job.request.inboxes.items():
            state = engine.client_states.read(device)
            member = BlockMember(job, device, engine.plan(job.request, device))
            size = member.block_size()
            shareable = not device.pooled_from and size > 1 and job.task.batch_key
            layouts = (
                layout(inbox),
                layout(state),
                _upload_shapes(job.task, device.model, inbox, engine.client_data.count(device)),
            )
            # the server works for one tier, and on one part of its examples, at a time
            apart = (device.tier, device.part) if device.is_server else size
            key = batch_key if shareable else id(job), device.model, apart, layouts, member.plan.shape
            alike[key].append((member, state))
    blocks = []
    for everything in alike.values():
        for group in _split_by_job(everything):
            group.sort(key=lambda one: (_by_length(one[0].plan), jobs.index(one[0].job), *_identity(one[0].device)))
            size = group[0][0].block_size()
            for tier, model in sorted({(one.device.tier, one.device.model) for one, _ in group}, key=lambda x: x[0]):
                _warn_if_random(tier, model)
                if min(size, len(group)) > 1:
                    _warn_if_slow(tier, model)
            if group[0][0].device.model.trains_interleaved():
                _compile_kernels(group[0][0].device.model, filled(min(size, len(group))))
            blocks += [_make_block(group[start : start + size]) for start in range(0, len(group), size)]
    return blocks


def _identity(device: Device) -> tuple[str, tuple[int, int]]:
    return device.name, device.part


def _by_length(plan: DevicePlan) -> tuple[int, tuple[int, ...]]:
    """Sorts plans: the most steps first, then by the sizes of batches."""
    return -len(plan.sizes), plan.sizes


@lru_cache(maxsize=1024)
def _warn_if_slow(tier: str, model: Model) -> None:
    """Once per tier and model; here, before workers are forked, so that none of them repeats the trial."""
    reason = model.one_by_one_reason()
    if reason:
        logger.warning("tier %s trains one device at a time, which is slower: %s", tier, reason)


@lru_cache(maxsize=1024)
def _compile_kernels(model: Model, devices: int) -> None:
    """Once per model and size of block; here, before workers are forked, or each of them would compile."""
    block = {name: torch.zeros(devices, *shape) for name, shape in model.shapes().items()}
    x = torch.stack([model.zero_inputs(2)] * devices)
    batch = Batch(x, torch.zeros(devices, 2, dtype=torch.int64), StepSeeds((0,) * devices))
    gradient(dummy_loss(model), block, batch)


@lru_cache(maxsize=1024)
def _warn_if_random(tier: str, model: Model) -> None:
    """Once per tier and model."""
    layer = model.draws_in_evaluation()
    if layer:
        advice = "pass training=self.training to dropout"
        logger.warning("tier %s is evaluated at random: %s draws in evaluation too; %s", tier, layer, advice)


def _split_by_job(group: list[tuple[BlockMember, Parcel]]) -> Iterable[list[tuple[BlockMember, Parcel]]]:
    """All in one group, or a group for each experiment where sharing a block would change the bits."""
    by_job: defaultdict[Job, list[tuple[BlockMember, Parcel]]] = defaultdict(list)
    for one in group:
        by_job[one[0].job].append(one)
    return [group] if len(by_job) == 1 or _is_invariant([member for member, _ in group]) else by_job.values()


def _upload_shapes(task: Task, model: Model, inbox: Parcel, examples: int) -> Hashable:
    """Shapes that may depend on how many examples a device holds: members of a block must upload alike."""
    specs = {bundle: spec(model, inbox, examples) for bundle, spec in task.sends.items()}
    return tuple((bundle, name, shape) for bundle, one in specs.items() for name, (shape, _) in one.items())


def _make_block(group: list[tuple[BlockMember, Parcel]]) -> Block:
    full = group + [group[-1]] * (_padded_size(group[0][0], len(group)) - len(group))
    members = [member for member, _ in full]
    inbox = join([member.job.request.inboxes[member.device] for member in members])
    return Block(members, len(group), inbox, join([state for _, state in full]))


def _padded_size(member: BlockMember, devices: int) -> int:
    """Pad a lone device to a block of two: a block of one selects other kernels and changes the bits. Lane kernels have
    no such difference, but want whole vectors."""
    alone = member.block_size() == 1 or member.device.pooled_from
    if alone or (member.device.is_server and not member.job.task.batch_key):  # nothing could ever share its block
        return devices
    return filled(devices) if member.device.model.trains_interleaved() else max(2, devices)


@dataclass(frozen=True)
class BlockResult(ClientResult):
    """What a block returns.

    Parameters
    ----------
    largest_part : how many devices ran at once, if memory was too small for all of them; 0: it was not.
    """

    largest_part: int = 0


def run_block(block: Block) -> BlockResult:
    """Run the task of a block. The result depends on nothing but the block and the recipe.

    A block that does not fit into the memory of an accelerator runs in two halves. Devices do not depend on each other,
    so the result is the same but for rounding, and the same bit for bit where `is_block_invariant` is True.
    """
    engine, key = block.members[0].job.engine, (block.members[0].device.tier, block.task.name)
    if len(block.members) <= engine.block_limits.get(key, len(block.members)):
        try:
            result = _try_block(block)
        except UnequalNumbersError:  # the task takes the learning rate of all for one number
            return _run_parts(block, _group_by_optimizer(block), smallest=2)
        if result is not None:
            return BlockResult(result.upload, result.state)
        engine.compute.release_memory()
        engine.block_limits[key] = (len(block.members) + 1) // 2
    middle, smallest = (block.devices + 1) // 2, 2 if len(block.members) > 2 else 1
    halves = _run_parts(block, [range(middle), range(middle, block.devices)], smallest)
    return replace(halves, largest_part=halves.largest_part or max(smallest, block.devices - middle))


def _try_block(block: Block) -> ClientResult | None:
    """Run a block; None if it does not fit into memory and could be halved.

    This is the one place where a block enters a torch device and leaves it: plan, inbox and state in one copy, uploads
    and new states in another. The data set is moved once per process.
    """
    compute = block.members[0].job.engine.compute
    client, inbox = _make_client(block), block.inbox
    if not compute.is_plain:
        client = _with_precision(client, compute)
    if compute.is_cpu:
        return run_task(join_tasks([member.job.task for member in block.members]), client, inbox)
    try:
        with compute.active():
            client, inbox = _enter_device(client, inbox, block.task.host_bundles, compute.torch_device)
            return leave(run_task(block.task, client, inbox))
    except torch.OutOfMemoryError:
        if block.devices == 1:
            raise
        return None


def _group_by_optimizer(block: Block) -> list[list[int]]:
    by_optimizer: defaultdict[Optimizer, list[int]] = defaultdict(list)
    for index in range(block.devices):
        by_optimizer[block.members[index].job.optimizer].append(index)
    return list(by_optimizer.values())


def _run_parts(block: Block, parts: Sequence[Sequence[int]], smallest: int) -> BlockResult:
    """Run some of a block's devices after the others.

    A part of fewer than `smallest` is filled with its last device: a block of one selects other kernels.
    """
    results, interleaved = [], block.model.trains_interleaved()
    for part in parts:
        size = max(smallest, filled(len(part)) if interleaved else len(part))
        rows = [*part, *[part[-1]] * (size - len(part))]
        members = [block.members[row] for row in rows]
        results.append(run_block(Block(members, len(part), _rows(block.inbox, rows), _rows(block.state, rows))))
    order = [row for part in parts for row in part]
    back = sorted(range(len(order)), key=order.__getitem__)

    def assemble(parcels: Sequence[Parcel]) -> Parcel:
        own = [_rows(parcel, range(len(part))) for parcel, part in zip(parcels, parts, strict=True)]
        return _rows(_concatenate(own), back)

    states = [result.state for result in results if result.state is not None]
    return BlockResult(
        assemble([result.upload for result in results]),
        assemble(states) if states else None,
        min((result.largest_part for result in results if result.largest_part), default=0),
    )


def _rows(parcel: Parcel, rows: Sequence[int]) -> Parcel:
    """Some devices of a block's parcel; what all devices share stays shared."""

    def take(tensor: Tensor) -> Tensor:
        is_shared = len(tensor) > 1 and tensor.stride(0) == 0
        return tensor[:1].expand(len(rows), *tensor.shape[1:]) if is_shared else tensor[list(rows)]

    return {bundle: combine(take, tensors) for bundle, tensors in parcel.items()}


def _concatenate(parcels: Sequence[Parcel]) -> Parcel:
    return {
        bundle: combine(lambda *parts: torch.cat(parts), *(one[bundle] for one in parcels)) for bundle in parcels[0]
    }


def run_task(task: Task, client: Client, inbox: Parcel) -> ClientResult:
    """Run a task where its tensors are; nothing in it may wait for their values."""
    return task.run(client, inbox)


def _make_client(block: Block) -> Client:
    """The devices of a block as its task sees them, on the CPU."""
    job = block.members[0].job
    stores = [member.job.engine.client_data for member in block.members]
    devices = [member.device for member in block.members]
    data = job.engine.client_data.dataset
    return Client(
        model=block.model,
        optimizer=join_optimizers([member.job.optimizer for member in block.members]),
        examples=data.train,
        tests=data.test,
        test_indices=pad_indices([store.tests(device) for store, device in zip(stores, devices, strict=True)]),
        train_indices=pad_indices([store.rows(device) for store, device in zip(stores, devices, strict=True)]),
        preparation=data.preparation,
        plan=merge_plans([member.plan for member in block.members]),
        seen_labels=torch.stack([store.seen_labels(device) for store, device in zip(stores, devices, strict=True)]),
        state=block.state,
        loss=job.engine.loss or default_loss(data.task),
        task=data.task,
        tier_models=job.engine.client_data.sizes,
    )


def _with_precision(client: Client, compute: Compute) -> Client:
    """The same with models that compute in another precision, or compiled."""
    tier_models = {
        name: model.computed(compute.precision, compute.compile) for name, model in client.tier_models.items()
    }
    return replace(client, model=client.model.computed(compute.precision, compute.compile), tier_models=tier_models)


def _enter_device(
    client: Client, inbox: Parcel, host_bundles: Collection[str], device: torch.device
) -> tuple[Client, Parcel]:
    """The same on a device: the data set stays there, all else crosses in one copy."""
    names = ("optimizer", "test_indices", "train_indices", "plan", "seen_labels", "state")
    own = {name: getattr(client, name) for name in names}
    at_host = {name: tensors for name, tensors in inbox.items() if name in host_bundles}
    moved, bundles = enter((own, {name: one for name, one in inbox.items() if name not in at_host}), device)
    examples, tests = (
        replace(store, x=resident(store.x, device), y=resident(store.y, device))
        for store in (client.examples, client.tests)
    )
    return replace(client, **moved, examples=examples, tests=tests), {**bundles, **at_host}


def _is_invariant(members: Sequence[BlockMember]) -> bool:
    sizes = {size for member in members for size in member.plan.sizes}
    return all(is_block_invariant(members[0].device.model, size) for size in sorted(sizes))


@lru_cache(maxsize=4096)
def is_block_invariant(model: Model, batch: int) -> bool:
    """True if gradients are bit-identical for every block size and position.

    Sums over a feature map run through whole vectors of channels, and the remainder is added in another order, so this
    depends on layers and batch size. It is tried: the last devices of eight must get the same gradients in a smaller
    block.
    """
    full = _trial_gradients(model, batch, 8)
    return all(_equal_last(_trial_gradients(model, batch, count), full) for count in (3, 7, 2, 5))


def _trial_gradients(model: Model, batch_size: int, count: int) -> dict[str, Tensor]:
    """Gradients of the last `count` of eight made-up devices, each with its own weights and examples."""
    trials: list[tuple[dict[str, Tensor], Tensor]] = []
    devices = range(8 - count, 8)
    for device in devices:
        draw = torch.Generator().manual_seed(device)
        weights = {name: torch.rand(shape, generator=draw) - 0.4 for name, shape in model.shapes().items()}
        trials.append((weights, model.random_inputs(draw, batch_size)))
    x, y = torch.stack([x for _, x in trials]), torch.zeros(count, batch_size, dtype=torch.int64)
    block = {name: torch.stack([weights[name] for weights, _ in trials]) for name in model.shapes()}
    batch = Batch(x, y, StepSeeds(tuple(devices)))
    return dict(gradient(dummy_loss(model), block, batch))


def _equal_last(fewer: dict[str, Tensor], full: dict[str, Tensor]) -> bool:
    count = len(next(iter(fewer.values())))
    return all(torch.equal(gradients, full[name][-count:]) for name, gradients in fewer.items())


def in_process(simulator: InProcess) -> Engine:
    """All devices on this machine, in this process or in worker processes."""
    return simulator


ENGINES: Registry[Callable[..., Any]] = Registry(
    "engines", {"in_process": in_process}, passed=("simulator", "experiment", "registries", "data", "folder")
)
"""Functions that return an `Engine`. They get those of the passed arguments that they name: `simulator`, the engine in
process, which holds the simulated devices and their data; `experiment`, everything that the recipe names; `registries`;
`data`, the folder of the data sets; `folder`, that of the run."""
