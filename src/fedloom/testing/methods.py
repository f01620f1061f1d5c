"""The contract of a method: one function for each thing that engines, checkpoints and reports rely on."""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from inspect import isclass
from typing import Any, get_args

import torch
from torch import Tensor

from ..client import Task
from ..data import LearningTask
from ..engines import BytesTransport, Compression, DryRun, InlineExecutor
from ..engines.compression import HalfPrecision, TopK
from ..engines.in_process import Block, BlockResult, Job, make_blocks, run_block
from ..engines.task_ref import task_from_json, task_to_json
from ..evaluation import Row
from ..fleet import DeviceModel, Engine, Reply, RoundContext, ServerModel, Traffic
from ..methods import METHODS, Method, MethodInfo, fleet_problem
from ..models import Family
from ..tensors import Parcel, all_finite, fingerprint, layout
from .doubles import InterceptingEngine, ScriptedEngine, committed_states, with_compression, with_transports
from .report import (
    METHOD_CHECKS,
    Broken,
    CheckFailed,
    CheckReport,
    copy_parcel,
    default_dtype,
    describe_difference,
    describe_error,
    global_seed,
    largest_difference,
    listed_in,
    reload_parcel,
    require_same,
    require_same_states,
    run_checks,
)
from .world import CHAOTIC_FAMILIES, TinyWorld, tiny_model

DEVICE_SIZES = (8, 8, 5, 9, 9, 7)
"""Training examples of the devices that methods are checked with: unequal, so that the devices of a
block have batches of several sizes."""

DEVICE_LABELS = ((0, 1), (1, 2), (0, 1, 2, 3), (3,), (0, 2), (1, 3))


def check_method(
    method: type[Method] | Method,
    *,
    model: str | Family | None = None,
    settings: Mapping[str, Any] | None = None,
    task: str | LearningTask | None = None,
) -> CheckReport:
    """Check that a method keeps the contract on which engines, evaluation, checkpoints and reports rely.

    It plays a few rounds on six devices with a few hundred weights, which takes some seconds. Run it in your tests; a
    method that passes can be simulated, deployed, resumed and compared like a built-in one. It does not know whether
    the algorithm is the paper's.

    Parameters
    ----------
    method
        The class of the method, or an instance.
    model
        The family to train, by name or as a function that builds a module; by default the first built-in family that
        the method takes.
    settings
        Hyperparameters, if the defaults are not enough or would take too long.
    task
        What is learned, by the name of a task; by default classification.

    Returns
    -------
    CheckReport
        The checks that passed.

    Raises
    ------
    CheckFailed
        By the first check that does not pass: its name, what was expected, what was found, and a hint.

    Examples
    --------
    >>> from fedloom.methods.fedavg import FedAvg
    >>> from fedloom.testing import check_method
    >>> report = check_method(FedAvg, settings={"weighting": "uniform"})
    >>> "check_reply_order" in report.passed
    True

    To see every failure on its own in pytest:

    >>> import pytest
    >>> from fedloom.testing import METHOD_CHECKS, TinyWorld
    >>> @pytest.mark.parametrize("check", METHOD_CHECKS.values(), ids=METHOD_CHECKS)
    ... def test_my_method(check):
    ...     check(FedAvg(), TinyWorld.for_method(FedAvg()))
    """
    made = _build_method(method, settings or {})
    check_declaration(made)
    try:
        world = TinyWorld.for_method(made, model, sizes=DEVICE_SIZES, labels=DEVICE_LABELS, task=task)
    except Exception as error:
        hint = "pass `model`, a family or a function that builds a module, that the method can train"
        raise CheckFailed("check_fleets", "a tiny fleet that it can train", describe_error(error), hint) from error
    return run_checks(f"{type(made).__name__} on {world.fleet.global_model.family}", METHOD_CHECKS, made, world)


def _build_method(method: type[Method] | Method, settings: Mapping[str, Any]) -> Method:
    try:
        if isclass(method):
            return method.from_settings(settings, METHODS)
        return replace(method, **settings) if settings else method  # type: ignore[type-var]
    except Exception as error:
        raise CheckFailed(
            "check_declaration",
            f"a class that can be built with the settings {dict(settings)}",
            describe_error(error),
            "give every hyperparameter a default, or pass the missing ones as `settings`; derive the class from "
            "fedloom.methods.Method and define `round`",
        ) from error


def _fresh(world: TinyWorld) -> TinyWorld:
    """The same world without the refusals of earlier checks."""
    return replace(world, refusals=[])


def require_no_refusals(world: TinyWorld) -> None:
    if world.refusals:
        first = world.refusals[0]
        hints = {
            "KEYS": "`sends` of the task must name every bundle and every tensor that it uploads, and no other",
            "SHAPE": "`sends` must declare the shapes without the device axis; like(bundle) takes those of the inbox",
            "DTYPE": "new tensors need a dtype: use new_zeros, zeros_like or torch.get_default_dtype(), so that "
            "everything also runs in float64",
            "NONFINITE": "the task uploads NaN or infinity, or would keep it: look for a division by zero or a log of "
            "zero, also for devices that lack some classes",
            "HUGE": "training diverges: look at the scale of the inputs, the learning rate and the terms of the loss",
        }
        raise Broken(
            "every reply is admitted: it is what `sends` declares, and finite",
            f"the reply of device {first.device} is refused: {first.code}, {first.reason}",
            hints.get(first.code, "compare what the task uploads with what its `sends` declares"),
        )


@listed_in(METHOD_CHECKS)
def check_declaration(method: Method, world: TinyWorld | None = None) -> str | None:
    """A method is a frozen, hashable dataclass of hyperparameters, and `info` describes it.

    So it can be compared, written into a recipe, and used in a cache; state cannot hide in it.
    """
    kind = type(method)
    if not is_dataclass(method) or not kind.__dataclass_params__.frozen:
        raise Broken(
            "a frozen dataclass", f"{kind.__name__} is not one", "decorate the class with @dataclass(frozen=True)"
        )
    info = getattr(method, "info", None)
    if not isinstance(info, MethodInfo):
        raise Broken("info = MethodInfo(...)", f"info = {info!r}", "import MethodInfo from fedloom.methods")
    for name in ("produces", "heterogeneity"):
        allowed = get_args(MethodInfo.__annotations__[name])
        if getattr(info, name) not in allowed:
            raise Broken(f"info.{name} is one of {allowed}", repr(getattr(info, name)), "see MethodInfo")
    for name in ("paper", "uploads", "client_state"):
        text = getattr(info, name)
        if not isinstance(text, str) or text != text.strip():
            raise Broken(f"info.{name} is text without blanks around it", repr(text), "it is shown by `fedloom list`")
    try:
        hash(method)
    except TypeError as error:
        odd = [one.name for one in fields(method) if not _is_hashable(getattr(method, one.name))]
        raise Broken(
            "hyperparameters that can be hashed",
            f"{', '.join(odd) or kind.__name__}: {error}",
            "use tuples for lists, and fedloom.settings.FrozenDict for dictionaries",
        ) from None
    return "" if info.uploads else "info.uploads is empty; say what leaves a device, for reports and privacy checks"


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


@listed_in(METHOD_CHECKS)
def check_start(method: Method, world: TinyWorld) -> None:
    """`start` and `init_client` give the same bits every time, from their seed alone.

    Workers, resumed runs and real devices call them again and must get the same tensors.
    """
    hint = "draw from torch.Generator().manual_seed(...) or fedloom.seeds.generator(seed, ...), never globally"
    expected = "the same bits every time, whatever the global generators are at"
    servers, states = [], []
    for seed in (1, 2):
        with global_seed(seed):
            servers.append(method.start(world.fleet, world.seed))
            devices = world.fleet.devices(1)
            states.append({device.name: method.init_client(device, world.seed) for device in devices})
    _require_parcel(servers[0], "start")
    require_same(servers[0], servers[1], expected, hint)
    for state in states[0].values():
        _require_parcel(state, "init_client")
    require_same_states(states[0], states[1], expected, hint)


def _require_parcel(parcel: Any, where: str) -> None:
    """Names -> names -> tensors, on the CPU and detached."""
    hint = "a parcel is a dict of bundles, each a dict of tensors: {'weights': {'layer.weight': tensor}}"
    if not isinstance(parcel, Mapping) or not all(isinstance(bundle, Mapping) for bundle in parcel.values()):
        raise Broken(f"{where} returns a parcel", f"{parcel!r:.80}", hint)
    for bundle, tensors in parcel.items():
        for name, tensor in tensors.items():
            if not isinstance(bundle, str) or not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise Broken(f"{where} returns tensors under names", f"{bundle!r}, {name!r}: {type(tensor)}", hint)
            if tensor.requires_grad or tensor.device.type != "cpu":
                found = "requires a gradient" if tensor.requires_grad else f"is on {tensor.device}"
                raise Broken(f"{where} returns plain tensors on the CPU", f"{bundle}: {name} {found}", "detach() it")


@listed_in(METHOD_CHECKS)
def check_warm_start(method: Method, world: TinyWorld) -> None:
    """`start` with `warm_start` offers the given weights for evaluation, if the server has a model.

    `fedloom run` continues from pretrained weights with it. They are those of the global model, so that a device which
    keeps weights starts with its own part of them.
    """
    earlier = {name: tensor + 1 for name, tensor in world.fleet.global_model.initial_weights(5).items()}
    warm = method.start(world.fleet, 0, earlier)
    for name, target in method.eval_targets(warm).items():
        if not isinstance(target, ServerModel):
            continue
        for tier in world.fleet.tiers:
            offered, expected = target.weights(tier), tier.footprint.read(earlier)
            if any(bool(own.any()) for own in offered.values()):  # there may be zeros for weights that it leaves out
                left_out = {name: own == 0 for name, own in offered.items() if name in expected}
                expected = {n: w.masked_fill(left_out[n], 0) if n in left_out else w for n, w in expected.items()}
            require_same(
                {"weights": offered},
                {"weights": expected},
                f"eval target {name!r} of tier {tier.name!r} has the weights of warm_start",
                "begin with `warm_start or fleet.global_model.initial_weights(seed)`",
                what="weights",
            )
    for device in world.fleet.devices(1):
        usual, state = (set(layout(method.init_client(device, 0, weights))) for weights in (None, earlier))
        if usual != state:
            bundle, name, shape = min(state - usual or usual - state)
            raise Broken(
                "init_client gives a device a state of the same layout with warm_start as without",
                f"device {device.name}, bundle {bundle!r}: {name} {shape} is only in one of them",
                "warm_start is a global model, of which a device keeps its own part: derive the class from "
                "fedloom.methods.PersonalModels, or read the part with device.footprint",
            )


@listed_in(METHOD_CHECKS)
def check_inputs_unchanged(method: Method, world: TinyWorld) -> None:
    """A round changes neither the server state it gets, nor a task its inbox and its device's state.

    Inboxes are views of the server state that devices share: a change in place would reach other devices.
    """
    executor = _WatchingExecutor()
    engine, server = world.engine(method, devices_per_block=1, executor=executor), method.start(world.fleet, world.seed)
    for number in (1, 2):
        before = copy_parcel(server)
        result = method.round(server, world.context(engine, number))
        hint = "tasks and rounds return new tensors: `a + b`, not `a += b`, `a.add_(b)` or `a[name] = b`"
        if executor.changed:
            raise Broken("a task leaves its inbox and client.state as they are", executor.changed[0], hint)
        require_same(server, before, "round leaves the server state that it gets as it is", hint)
        _require_parcel(result, "round")
        server = result
        engine.commit(number)


@dataclass
class _WatchingExecutor(InlineExecutor):
    """Notes which tensors a task changes in place."""

    changed: list[str] = field(default_factory=list)

    def run(self, job: Job) -> Iterator[tuple[Block, BlockResult]]:
        for block in make_blocks([job]):
            watched = [
                ("its inbox", block.inbox, copy_parcel(block.inbox)),
                ("client.state", block.state, copy_parcel(block.state)),
            ]
            result = run_block(block)
            for what, now, before in watched:
                found = describe_difference(now, before)
                if found:
                    self.changed.append(f"task {block.task.name!r} changes {what}: {found}")
            yield block, result


Layouts = dict[tuple[str, str, str], tuple[tuple[int, ...], torch.dtype]]


@listed_in(METHOD_CHECKS)
def check_uploads(method: Method, world: TinyWorld) -> None:
    """Devices upload exactly what `sends` declares: names, shapes and dtypes.

    The gate refuses anything else, and `fedloom plan` counts bytes by the declaration alone, without devices.
    """
    world = _fresh(world)
    engine = world.engine(method)
    real, dry = InterceptingEngine(engine), InterceptingEngine(DryRun(engine.client_data.count))
    method.round(method.start(world.fleet, world.seed), world.context(real))
    require_no_refusals(world)
    method.round(method.start(world.fleet, world.seed), world.context(dry))
    expected, hint = (
        "a round on all-zero uploads asks the same devices for the same uploads",
        "see `sends` of the tasks",
    )
    if len(real.requests) != len(dry.requests):
        raise Broken(expected, f"{len(real.requests)} requests with devices, {len(dry.requests)} without", hint)
    found, declared = ([_layouts(reply) for reply in one.delivered] for one in (real, dry))
    for here, there in zip(*(sorted(one, key=lambda one: sorted(one)) for one in (found, declared)), strict=True):
        if here != there:
            odd = min(key for key in {*here, *there} if here.get(key) != there.get(key))
            kinds = f"{here.get(odd)} with devices, {there.get(odd)} declared"
            raise Broken(expected, f"device {odd[0]}, bundle {odd[1]!r}, tensor {odd[2]!r}: {kinds}", hint)
    if not real.delivered:
        raise Broken("a round asks devices", "no device was asked", "call context.ask(task, inboxes) in `round`")


def _layouts(reply: Reply) -> Layouts:
    found: Layouts = {(reply.device.name, "", ""): ((), torch.bool)}  # to record devices that upload nothing
    for bundle, tensors in reply.upload.items():
        for name, tensor in tensors.items():
            found[reply.device.name, bundle, name] = (tuple(tensor.shape), tensor.dtype)
    return found


@listed_in(METHOD_CHECKS)
def check_traffic(method: Method, world: TinyWorld) -> None:
    """A round without devices counts the bytes that a round with devices moves.

    So `fedloom plan` predicts what a run will cost.
    """
    engine = world.engine(method)
    real, dry = world.context(engine), DryRun(engine.client_data.count)
    method.round(method.start(world.fleet, 0), real)
    method.round(method.start(world.fleet, 0), world.context(dry))
    planned = sum(dry.bytes_down.values()), sum(dry.bytes_up.values())
    moved = real.traffic.bytes_down, real.traffic.bytes_up
    if planned != moved:
        raise Broken(
            f"{planned} bytes down and up, as planned",
            f"{moved}",
            "what a round asks for must not depend on the values that devices upload",
        )


@listed_in(METHOD_CHECKS)
def check_task_lookup(method: Method, world: TinyWorld) -> None:
    """Tasks, and the functions of device models, are found by their name.

    No code is sent: worker processes and real devices look the task up in a method of their own.
    """
    recorder = InterceptingEngine(world.engine(method))
    server = world.play(method, recorder, rounds=1)
    finished = method.finish(server, world.context(recorder, 2))
    for request in recorder.requests:
        task = task_from_json(task_to_json(request.task), lambda ref: _find(method, ref))
        if not isinstance(task, Task) or task.sends.keys() != request.task.sends.keys():
            raise Broken(
                f"method.find{tuple(request.task.ref or (request.task.name,))} is the task",
                f"{task!r:.80}",
                "tasks are functions of the class under @on_device(sends=...); override `find` for others",
            )
    for target in method.eval_targets(finished or server).values():
        if isinstance(target, DeviceModel):
            _find(method, target.load_ref)


def _find(method: Method, ref: tuple[str, ...]) -> Any:
    try:
        return method.find(*ref)
    except (AttributeError, TypeError) as error:
        raise Broken(
            f"method.find{ref} finds it",
            f"{type(error).__name__}: {error}",
            "make it a function of the class, not a lambda or an inner function, or override `find`",
        ) from error


@listed_in(METHOD_CHECKS)
def check_repeated_run(method: Method, world: TinyWorld) -> None:
    """The same run gives the same bits, whatever the global random generators are at.

    Everything random is drawn from the seed, the round and a purpose, so results can be reproduced.
    """
    found = []
    for seed in (1, 2):
        engine = world.engine(method)
        with global_seed(seed):
            found.append((world.play(method, engine, participation=0.6), committed_states(engine)))
    expected = "two runs with the same seed give the same bits"
    hint = (
        "draw from context.draw('purpose') on the server, and on devices use the batches of `fit` or seeds from the "
        "inbox; never torch.rand, numpy.random or random. Do not iterate over a set, nor keep state in the method"
    )
    require_same(found[0][0], found[1][0], expected, hint)
    require_same_states(found[0][1], found[1][1], expected, hint)


@listed_in(METHOD_CHECKS)
def check_reply_order(method: Method, world: TinyWorld) -> None:
    """The order in which replies arrive does not change a bit.

    On real devices, and with worker processes, it is never the same twice.
    """
    shuffle = random.Random(4)
    shuffled = InterceptingEngine(world.engine(method), lambda replies: shuffle.sample(replies, len(replies)))
    require_same(
        world.play(method, shuffled),
        world.play(method, world.engine(method)),
        "the same bits for every order of replies",
        "use context.ask, which sorts replies by device, and not context.engine.ask",
    )


@listed_in(METHOD_CHECKS)
def check_missing_replies(method: Method, world: TinyWorld, kept: int = 1) -> None:
    """A round in which few devices reply, here one, ends with a state of the usual layout.

    Devices are switched off, late, or refused; each request may be answered by any of them.
    """
    first = method.start(world.fleet, 0)
    server = world.play(method, InterceptingEngine(world.engine(method), lambda replies: replies[:kept]))
    hint = "look for a division by the number of replies, or a dictionary that is expected to hold every device"
    _require_layout(first, server, f"with {kept} replies to every request", hint)
    if kept == 0:
        require_same(
            server,
            first,
            "rounds without a reply leave the server state as it is",
            "return `server` if there is nothing to aggregate; context.aggregate does so by itself",
        )


@listed_in(METHOD_CHECKS)
def check_no_replies(method: Method, world: TinyWorld) -> None:
    """Rounds without a reply, or without a cohort, leave the server state as it is.

    It happens: no device is reachable, or all replies are refused.
    """
    server, silent = method.start(world.fleet, 0), ScriptedEngine(lambda device, inbox: None)
    expected = "rounds without a reply leave the server state as it is"
    hint = "return `server` if there is nothing to aggregate; context.aggregate does so by itself"
    require_same(world.play(method, silent), server, expected, hint)
    trained = world.play(method, world.engine(method), rounds=1)
    require_same(method.round(trained, world.context(silent, 2)), trained, expected, hint)
    context = replace(world.context(world.engine(method)), cohort=[])
    _require_layout(server, method.round(server, context), "without a cohort", "`context.cohort` may be empty")


def _require_layout(first: Parcel, server: Parcel, when: str, hint: str) -> None:
    """The same names and shapes, but tensors that start empty may grow; everything finite."""
    for bundle in sorted({*first, *server}):
        names = first.get(bundle, {}).keys(), server.get(bundle, {}).keys()
        if bundle not in first or bundle not in server or names[0] != names[1]:
            odd = sorted(names[0] ^ names[1])[:3] or [bundle]
            found = f"bundle {bundle!r}: {', '.join(odd)} is only in one of start and round"
            raise Broken(f"server state keeps its bundles and names {when}", found, hint)
        for name, tensor in first[bundle].items():
            grows = len(tensor.shape) > 0 and len(tensor) == 0
            now = server[bundle][name]
            if now.shape[grows:] != tensor.shape[grows:]:
                found = f"bundle {bundle!r}, tensor {name!r}: {tuple(tensor.shape)} becomes {tuple(now.shape)}"
                raise Broken(f"server state keeps its shapes {when}", found, hint)
        if not all_finite(server[bundle].values()):
            raise Broken(f"server state is finite {when}", f"bundle {bundle!r} holds NaN or infinity", hint)


@listed_in(METHOD_CHECKS)
def check_lost_reply(method: Method, world: TinyWorld) -> None:
    """A device whose reply is lost counts as one that was not asked.

    Its weight, its examples and its state must not enter the round in another way.
    """
    name = world.fleet.name(min(2, world.fleet.size - 1))
    lost = InterceptingEngine(
        world.engine(method, devices_per_block=1), lambda replies: [one for one in replies if one.device.name != name]
    )
    server = method.round(method.start(world.fleet, 0), world.context(lost))
    context = world.context(world.engine(method, devices_per_block=1))
    fewer = replace(context, cohort=[one for one in context.cohort if one.name != name])
    if any(reply.device.pooled_from for reply in lost.delivered):
        fewer = context  # it asks one device with all data, for any cohort
    require_same(
        server,
        method.round(method.start(world.fleet, 0), fewer),
        "a round that loses the reply of a device is a round without that device",
        "weigh by the replies, not by context.cohort: `for reply in replies`, `reply.examples`",
    )


@listed_in(METHOD_CHECKS)
def check_cohort_only(method: Method, world: TinyWorld) -> None:
    """A round changes the states of its cohort alone."""
    engine, server = world.engine(method), method.start(world.fleet, 0)
    for number in (1, 2, 3):
        before = {name: fingerprint(parcel) for name, parcel in committed_states(engine).items()}
        context = world.context(engine, number, participation=0.3)
        server = method.round(server, context)
        engine.commit(number)
        after = {name: fingerprint(parcel) for name, parcel in committed_states(engine).items()}
        others = {name for name in after if before.get(name) != after[name]} - {one.name for one in context.cohort}
        if others:
            raise Broken(
                f"round {number} asks devices {[one.name for one in context.cohort]} only",
                f"the states of devices {sorted(others)} changed",
                "ask `context.cohort`, not context.fleet.devices(...)",
            )


@listed_in(METHOD_CHECKS)
def check_serialization(method: Method, world: TinyWorld) -> None:
    """Server state, uploads and device states survive a file: named tensors that share no memory."""
    engine = world.engine(method)
    recorder = InterceptingEngine(engine)
    server = world.play(method, recorder, rounds=1)
    parcels = {"server state": server} | {f"state of device {k}": p for k, p in committed_states(engine).items()}
    parcels |= {f"upload of device {reply.device.name}": reply.upload for reply in recorder.delivered}
    for what, parcel in parcels.items():
        expected = "the same bits after a file was written and read"
        hint = "two names must not share memory: clone() one of them, and call contiguous() after a transpose"
        try:
            require_same(reload_parcel(parcel), parcel, expected, hint, what=what)
        except (RuntimeError, ValueError, TypeError) as error:
            raise Broken(expected, f"{what}: {error}".splitlines()[0], hint) from error


@listed_in(METHOD_CHECKS)
def check_resume(method: Method, world: TinyWorld) -> None:
    """A run that continues from saved states gives the bits of one that was not interrupted.

    So all state is in the server state and the states of devices, and none in the method or in a global variable.
    """
    straight, interrupted = world.engine(method), world.engine(method)
    whole = world.play(method, straight, rounds=2)
    half = world.play(method, interrupted, rounds=1)
    states = interrupted.client_states
    states.committed = {name: reload_parcel(parcel) for name, parcel in states.committed.items()}
    resumed = method.round(reload_parcel(half), world.context(interrupted, 2))
    interrupted.commit(2)
    expected = "a run resumed after round 1 gives the bits of a whole run"
    hint = (
        "what a later round needs belongs into the parcel that `round` returns, or into ClientResult(state=...); names "
        "may come back in another order, so do not rely on it"
    )
    require_same(resumed, whole, expected, hint)
    require_same_states(committed_states(interrupted), committed_states(straight), expected, hint)


@listed_in(METHOD_CHECKS)
def check_blocks_train_alike(method: Method, world: TinyWorld) -> None:
    """Devices that run as one network learn what each learns alone, in float64, to 1e-8.

    In a task every tensor has the devices in front; a reduction over that axis would mix devices.
    """
    hint = (
        "tensors in a task are [K, ...], one row per device: reduce over trailing axes only, keep a loss [K], and use "
        "inner, per_device and combine of fedloom.tensors; no .item() and no branch on a tensor's value"
    )
    _compare_blocks(method, _fresh(world), hint)


@listed_in(METHOD_CHECKS)
def check_unequal_steps(method: Method, world: TinyWorld) -> None:
    """Devices of a block that take different numbers of steps learn what each learns alone, in float64, to 1e-8.

    In a step only the devices that have a batch of its size are active; those that are done wait for the others.
    """
    schedule = replace(world.schedule, last="wrap")
    hint = (
        "count a device's own steps by sum(step.active for step in client.plan), [K], not by len(client.plan). "
        "client.train_batches pads devices with fewer examples: mask by its second value; and batch norm sees the "
        "padding too, unless the model runs with with_batchnorm_statistics(client, weights). Else see the hint of "
        "check_blocks_train_alike"
    )
    _compare_blocks(method, replace(_fresh(world), schedule=schedule), hint)


def _compare_blocks(method: Method, world: TinyWorld, hint: str) -> None:
    """One device at a time, and all that can share a block together."""
    alone, together = world.engine(method, devices_per_block=1), world.engine(method, devices_per_block=16)
    recorders = [InterceptingEngine(engine) for engine in (alone, together)]
    with default_dtype(torch.float64):
        servers = [world.play(method, recorder) for recorder in recorders]
    require_no_refusals(world)
    expected = "a block of devices learns what each device learns alone"
    for one, other in zip(*(_by_device(recorder.delivered) for recorder in recorders), strict=True):
        require_same(one.upload, other.upload, expected, hint, 1e-8, f"upload of device {one.device.name}")
    require_same(servers[0], servers[1], expected, hint, 1e-8)
    require_same_states(committed_states(alone), committed_states(together), expected, hint, 1e-8)
    if not servers[0] and not committed_states(alone):
        raise Broken("something is trained", "server state and device states are empty", "return a state from `round`")


def _by_device(replies: Sequence[Reply]) -> list[Reply]:
    """Device after device, the replies of each in the order of its requests."""
    return sorted(replies, key=lambda reply: reply.device.name)


@listed_in(METHOD_CHECKS)
def check_blocks_evaluate_alike(method: Method, world: TinyWorld) -> None:
    """Devices that run as one network are evaluated as each alone, in float64, to 1e-8."""
    found = []
    with default_dtype(torch.float64):
        for block in (1, 16):
            engine = world.engine(method, devices_per_block=block)
            found.append(world.evaluate(method, world.play(method, engine, rounds=1), engine))
    require_rows(found[0])
    hint = "the function of a DeviceModel gets and returns tensors [K, ...], one row per device"
    for one, other in zip(*found, strict=True):
        if replace(one, value=0.0) != replace(other, value=0.0) or not _close(one.value, other.value, 1e-8):
            raise Broken("the same rows from a block as from single devices", f"{one} and {other}", hint)


def _close(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) <= tolerance or (math.isnan(one) and math.isnan(other))


def require_rows(rows: Sequence[Row]) -> None:
    if not rows:
        raise Broken("eval_targets offers models to evaluate", "no row", "return at least one target")


@listed_in(METHOD_CHECKS)
def check_evaluation(method: Method, world: TinyWorld) -> None:
    """After a round every tier has a model that can be evaluated, in float32 and in float64."""
    for dtype in (torch.float32, torch.float64):
        fresh = _fresh(world)
        with default_dtype(dtype):
            engine = fresh.engine(method)
            rows = fresh.evaluate(method, fresh.play(method, engine, rounds=1), engine)
        require_no_refusals(fresh)
        require_rows(rows)
        missing = {tier.name for tier in fresh.fleet.active_tiers} - {row.tier for row in rows}
        if missing:
            raise Broken(
                "every tier has a model to evaluate",
                f"no target covers tier {', '.join(sorted(missing))}",
                "leave `tiers` of the targets empty for all, or add a target for the others",
            )


@listed_in(METHOD_CHECKS)
def check_evaluation_changes_nothing(method: Method, world: TinyWorld) -> None:
    """Evaluation changes neither the server state nor a device's."""
    engine = world.engine(method)
    server = world.play(method, engine, rounds=1)
    before = copy_parcel(server), {name: copy_parcel(parcel) for name, parcel in committed_states(engine).items()}
    world.evaluate(method, server, engine)
    engine.commit(1)
    expected, hint = (
        "the same bits before and after evaluation",
        "the functions of eval_targets change nothing in place",
    )
    require_same(server, before[0], expected, hint)
    require_same_states(committed_states(engine), before[1], expected, hint)


@listed_in(METHOD_CHECKS)
def check_produces(method: Method, world: TinyWorld) -> None:
    """`produces` matches `eval_targets`: server models alone are "global", else it is "personalized"."""
    engine = world.engine(method)
    targets = method.eval_targets(world.play(method, engine, rounds=1))
    kinds = {name: type(target).__name__ for name, target in targets.items()}
    is_global = all(isinstance(target, ServerModel) for target in targets.values())
    if not targets or is_global != (method.produces == "global"):
        raise Broken(
            f"targets of a method with produces = {method.produces!r}",
            f"{kinds}",
            'ServerModel for "global"; at least one DeviceModel for "personalized"',
        )


@listed_in(METHOD_CHECKS)
def check_finish(method: Method, world: TinyWorld) -> None:
    """`finish` asks no device and returns None, or asks some and returns a state of the usual layout, always alike."""
    ended, server = _finished(method, world, 1)
    if ended is None:
        return
    names = {bundle: sorted(tensors) for bundle, tensors in ended.items()}
    if names != {bundle: sorted(tensors) for bundle, tensors in server.items()}:
        raise Broken("a state with the names of `round`'s", f"{names!r:.120}", "return the whole state")
    again, _ = _finished(method, world, 2)
    require_same(ended, again or {}, "the same bits every time", "draw from context.draw('purpose') only")


def _finished(method: Method, world: TinyWorld, global_seed_at: int) -> tuple[Parcel | None, Parcel]:
    """What `finish` returns, and the server state that it was given."""
    engine = InterceptingEngine(world.engine(method))
    server = world.play(method, engine, rounds=1)
    engine.delivered.clear()
    with global_seed(global_seed_at):
        ended = method.finish(server, world.context(engine, 2))
    if (ended is None) != (engine.delivered == []):
        asked = f"{len(engine.delivered)} replies, and returns {'None' if ended is None else 'a state'}"
        raise Broken("an exchange with devices and a new state, or neither", asked, "see Method.finish")
    return ended, server


@listed_in(METHOD_CHECKS)
def check_training_changes_state(method: Method, world: TinyWorld) -> None:
    """Two rounds change the server state or the states of devices."""
    with default_dtype(torch.float64):
        engine = world.engine(method)
        change = largest_change(method, world, world.play(method, engine), committed_states(engine))
    if change <= 1e-3:
        raise Broken(
            "two rounds of training change something by more than 0.001",
            f"the largest change is {change:.3g}",
            "return the new weights from `round`, or ClientResult(state=...) from the task",
        )


def largest_change(method: Method, world: TinyWorld, server: Parcel, states: Mapping[str, Parcel]) -> float:
    """By how much a run changed a number of the server state or of a device's state; inf if all shapes changed."""
    first = method.start(world.fleet, world.seed)
    moved = [largest_difference(first, server)] if layout(first) == layout(server) else []
    for device in world.fleet.devices(1):
        initial, last = method.init_client(device, world.seed), states.get(device.name, {})
        moved += [largest_difference(initial, last)] if layout(initial) == layout(last) else []
    return max(moved, default=math.inf)


@listed_in(METHOD_CHECKS)
def check_learning(method: Method, world: TinyWorld, rounds: int = 3) -> None:
    """Training lowers the loss on data that is easy to learn; where only accuracy is measured, it raises that.

    Of the best target, averaged over tiers and devices: a method may offer others for comparison. Accuracy is that of
    the devices' own test examples: a personal model forgets the classes that its device lacks.
    """
    before, after = world.engine(method), world.engine(method)
    first = world.evaluate(method, method.start(world.fleet, world.seed), before)
    last = world.evaluate(method, world.play(method, after, rounds), after, rounds)
    gains = {name: _mean_gain(first, last, name) for name in {row.candidate for row in last}}
    best = max(gains, key=lambda name: gains[name])
    if not gains[best] > 0:
        raise Broken(
            f"a lower loss, or a higher accuracy, after {rounds} rounds",
            f"that of target {best!r} changes by {-gains[best]:.3g} to the worse",
            "does the task return the weights that `fit` gives back, and does the server use them? Is the sign of an "
            "update right? Is a term of the loss much larger than the others?",
        )


def _mean_gain(first: Sequence[Row], last: Sequence[Row], target: str) -> float:
    """By how much the loss of a target falls, else its accuracy on the devices' own test examples rises."""
    first, last = ([row for row in rows if row.candidate == target] for rows in (first, last))
    metric = "loss" if any(row.metric == "loss" for row in last) else "accuracy"
    tests = {"local"} if metric == "accuracy" else {row.test for row in last}
    values = [[row.value for row in rows if row.metric == metric and row.test in tests] for rows in (first, last)]
    before, after = (sum(one) / max(1, len(one)) for one in values)
    return before - after if metric == "loss" else after - before


@listed_in(METHOD_CHECKS)
def check_messages(method: Method, world: TinyWorld) -> None:
    """Uploads that travel as bytes give the same bits: on a network there are no Python objects."""
    world = _fresh(world)
    here, there = world.engine(method), world.engine(method)
    network = BytesTransport(report=there.gate.report)
    servers = [world.play(method, engine, rounds=1) for engine in (here, with_transports(there, network))]
    require_no_refusals(world)
    expected, hint = "the same bits by messages as in process", "upload plain, contiguous tensors"
    require_same(servers[0], servers[1], expected, hint)
    require_same_states(committed_states(here), committed_states(there), expected, hint)


SPARSE_UPLINK = Compression(TopK(0.1), HalfPrecision(torch.bfloat16))


@listed_in(METHOD_CHECKS)
def check_compression(method: Method, world: TinyWorld, compression: Compression = SPARSE_UPLINK) -> None:
    """Two rounds with compressed messages end in a finite state, with fewer bytes, and the same bits over a network."""
    world = _fresh(world)
    engine, other = world.engine(method), world.engine(method)
    network = BytesTransport(encoded_task=compression.encoded_task, report=other.gate.report)
    here, moved = _play_compressed(world, method, with_compression(engine, compression), compression)
    for traffic in moved:
        sizes = (
            (traffic.compressed_bytes_down, traffic.bytes_down),
            (traffic.compressed_bytes_up, traffic.bytes_up),
        )
        if any(small > large for small, large in sizes):
            raise Broken("compressed messages are no larger", f"{sizes} bytes down and up", "see docs on compression")
        totals = sum(traffic.compressed_by_device.values()), sum(traffic.bytes_by_device.values())
        if totals != (sum(small for small, _ in sizes), sum(large for _, large in sizes)):
            raise Broken("bytes of all devices add up", f"{totals} and {sizes}", "exchange through context.ask only")
    require_no_refusals(world)
    hint = "the server must work with inexact uploads, and tasks with inexact inboxes"
    if not all(all_finite(tensors.values()) for tensors in here.values()):
        raise Broken("a finite server state", "NaN or infinity", hint)
    there, _ = _play_compressed(world, method, with_compression(other, compression, network), compression)
    require_no_refusals(world)
    expected = "the same bits by messages as in process"
    require_same(here, there, expected, hint)
    require_same_states(committed_states(engine), committed_states(other), expected, hint)


def _play_compressed(
    world: TinyWorld, method: Method, engine: Engine, compression: Compression
) -> tuple[Parcel, list[Traffic]]:
    server, moved = method.start(world.fleet, world.seed), []
    for number in (1, 2):
        context = replace(world.context(engine, number), wire=compression)
        server = method.round(server, context)
        engine.commit(number)
        moved.append(context.traffic)
    return server, moved


@listed_in(METHOD_CHECKS)
def check_redrawn_tiers(method: Method, world: TinyWorld) -> str | None:
    """Fleets whose devices are of another tier every round are trained, or refused with a reason.

    Only the cohort is asked, each device in its tier of the round, and a block learns as each device alone.
    """
    world = replace(_fresh(world), fleet=replace(world.fleet, assignment="redrawn"))
    problem = fleet_problem(method, world.fleet)
    if problem is not None:
        return f"refused: {problem}"
    if len(world.fleet.active_tiers) == 1:
        return "not tried: there is one tier only"
    try:
        servers = [_play_redrawn(method, world, block) for block in (1, 16)]
    except Broken:
        raise
    except Exception as error:
        raise Broken(
            "devices that change their tier are trained, or refused by check_fleet",
            describe_error(error),
            "a device that keeps its model, or a part of one, cannot change its tier: let check_fleet return "
            "fixed_tiers_problem(fleet) of fedloom.methods.method",
        ) from error
    require_no_refusals(world)
    hint = "see check_blocks_train_alike"
    tolerance = 1e-8 if world.fleet.global_model.family in CHAOTIC_FAMILIES else 1e-10
    require_same(servers[0], servers[1], "a block of devices learns what each device learns alone", hint, tolerance)
    with default_dtype(torch.float64):
        moved = largest_difference(servers[0], method.start(world.fleet, 0))
    if moved <= 1e-3:
        raise Broken("three rounds change the server state", f"the largest change is {moved:.3g}", "else refuse it")
    return None


def _play_redrawn(method: Method, world: TinyWorld, devices_per_block: int) -> Parcel:
    engine = InterceptingEngine(world.engine(method, devices_per_block=devices_per_block))
    with default_dtype(torch.float64):
        server = method.start(world.fleet, 0)
        for number in (1, 2, 3):
            context = world.context(engine, number, participation=0.6)
            server = method.round(server, context)
            engine.commit(number)
            _require_asked_in_tier(engine.delivered, context)
            engine.delivered.clear()
    return server


def _require_asked_in_tier(replies: Sequence[Reply], context: RoundContext) -> None:
    asked = [(reply.device.name, reply.device.tier) for reply in replies if not reply.device.is_server]
    cohort = {(device.name, device.tier) for device in context.cohort}
    pooled = any(reply.device.pooled_from for reply in replies)
    if (set(asked) != cohort and not pooled) or len(asked) != context.traffic.asked:
        raise Broken(
            "the cohort is asked, each device in its tier of the round",
            f"{sorted(asked)} where the cohort is {sorted(cohort)}",
            "use the devices of context.cohort as they are in this round, not those of an earlier one",
        )


@listed_in(METHOD_CHECKS)
def check_fleets(method: Method, world: TinyWorld) -> str | None:
    """A fleet that the method cannot train is refused with a sentence before training; any other is trained.

    Tried with one model, with two widths, with two families, and with a tier that has no device.
    """
    convnet, mlp = tiny_model("convnet"), tiny_model("mlp")
    widths = TinyWorld.make(widths=(1.0, 0.5), sizes=(8, 5, 8))
    fleets = {
        "one model": TinyWorld.make(sizes=(8, 5, 8)),
        "two widths": widths,
        "two families": TinyWorld.make(models=[("a", convnet), ("b", mlp)], sizes=(8, 5, 8)),
        "an empty tier": replace(widths, fleet=replace(widths.fleet, shares=(0.0, 1.0))),
    }
    refused = []
    for name, one in fleets.items():
        problem = fleet_problem(method, one.fleet)
        if problem is not None and (not isinstance(problem, str) or len(problem.split()) < 3):
            raise Broken(
                "check_fleet returns a sentence or None", f"{name}: {problem!r}", "say what does not fit, and why"
            )
        if problem is not None:
            refused.append(name)
            continue
        hint = "let check_fleet return the reason, or set info.heterogeneity; then a recipe is refused before training"
        try:
            one.play(method, one.engine(method), rounds=1)
        except Exception as error:
            found = f"a fleet of {name} is accepted, and fails: {describe_error(error)}"
            raise Broken("fleets that cannot be trained are refused by check_fleet", found, hint) from error
        if one.refusals:
            found = f"a fleet of {name} is accepted, and replies are refused: {one.refusals[0].reason}"
            raise Broken("fleets that cannot be trained are refused by check_fleet", found, hint)
    return f"refuses {', '.join(refused)}" if refused else None
