"""The contract of a model family."""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ..data import LearningTask
from ..exporting import build_empty_module
from ..exporting.formats import exported_program
from ..fleet import Fleet, find_nesting_problem, make_tiers
from ..methods import METHODS
from ..models import Family, LayoutError, Model, StepSeeds, build_model
from ..models.structure import as_outputs
from ..tensors import Parcel, Tensors
from .doubles import random_block
from .methods import require_no_refusals, require_rows
from .report import (
    MODEL_CHECKS,
    Broken,
    CheckFailed,
    CheckReport,
    default_dtype,
    describe_error,
    global_seed,
    largest_difference,
    listed_in,
    require_same,
    run_checks,
    same_bits,
)
from .world import TinyWorld, family_task, find_family, find_task, takes_setting, tiny_shape


def check_model(
    factory: str | Family,
    *,
    input_shape: tuple[int, ...] | None = None,
    classes: int = 4,
    tiers: Sequence[Mapping[str, Any]] | None = None,
    tokens: int | None = None,
    task: str | LearningTask | None = None,
) -> CheckReport:
    """Check that a function builds modules that can be trained, sliced into tiers and run for many devices at once.

    Parameters
    ----------
    factory
        A function from keyword settings to a plain `nn.Module`, or the name of a built-in family.
    input_shape
        Of one example: by default `(1, 6, 6)`, or `(5,)` for tokens.
    classes
        How many logits the module must have.
    tiers
        The settings of every tier, the largest first: by default `({}, {"width": 0.5})`, or `({},)` if the function
        has no parameter `width`.
    tokens
        The number of different token ids, if inputs are tokens.
    task
        What it is for, by the name of a task: "segmentation" for nets that predict every pixel; by default what a
        built-in family is for, else classification.

    Returns
    -------
    CheckReport
        Its notes say why tiers do not nest, why devices cannot be folded, or why it cannot be exported.

    Raises
    ------
    CheckFailed
        By the first check that does not pass.

    Examples
    --------
    >>> from torch import nn
    >>> from fedloom.testing import check_model
    >>> def net(*, input_shape, classes, width=1.0):
    ...     hidden, inputs = int(8 * width), input_shape[0] * input_shape[1] * input_shape[2]
    ...     return nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))
    >>> check_model(net).notes
    {}
    """
    name, build = find_family(factory)
    known = signature(build).parameters
    shape = input_shape or ((5,) if tokens else tiny_shape(name, (1, 6, 6)))
    settings = tiers or (({}, {"width": 0.5}) if takes_setting(known, "width") else ({},))
    try:
        learned = find_task(task or family_task(name, build))
        pixels = (shape[-2:], learned.class_axis) if learned.positions == "pixels" else (None, -1)
        models = tuple(build_model(name, build, dict(one), shape, classes, tokens, *pixels) for one in settings)
    except Exception as error:
        hint = "settings are numbers, strings, tuples or booleans"
        raise CheckFailed("check_module", "settings that make a model", describe_error(error), hint) from error
    return run_checks(name, MODEL_CHECKS, models)


def _inputs(model: Model, *leading: int, seed: int = 0) -> Tensor:
    return model.random_inputs(torch.Generator().manual_seed(seed), *leading)


@listed_in(MODEL_CHECKS)
def check_module(models: Sequence[Model]) -> None:
    """The function builds a torch module with weights, from keyword settings."""
    for model in models:
        module = model.build(**dict(model.settings))
        if not isinstance(module, nn.Module):
            raise Broken("an nn.Module", f"{type(module).__name__}", "return the module, not a class or a function")
        try:
            has_weights = bool(model.shapes())
        except LayoutError as error:
            raise Broken("`stacked_axes` that fit the weights", str(error), "see `heads` and `packed`") from error
        if not has_weights:
            found = "all of them are frozen" if model.frozen_shapes() else "no parameter"
            raise Broken("a module with weights to train", found, "assign layers to attributes of the module")


@listed_in(MODEL_CHECKS)
def check_output_size(models: Sequence[Model]) -> None:
    """For every example, or every token, each exit has one finite logit per class."""
    for model in models:
        x = _inputs(model, 3)
        with torch.no_grad():
            outputs = as_outputs(model.module().train()(x))
        shapes = [(3, model.classes)] + [(3, *model.input_shape, model.classes)] * (model.tokens is not None)
        if model.target_shape is not None:
            shapes = [(3, *model.output_shape())]
        for name, logits in outputs.exits.items():
            if not isinstance(logits, Tensor) or tuple(logits.shape) not in shapes:
                found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
                raise Broken(
                    f"logits of shape {' or '.join(map(str, shapes))} for 3 examples and {model.classes} classes",
                    f"exit {name!r}: {found}",
                    "take `classes` as a parameter of the function, and build the last layer with it",
                )
            if not bool(logits.isfinite().all()):
                raise Broken("finite logits", f"exit {name!r} has NaN or infinity", "check the initialization")


@listed_in(MODEL_CHECKS)
def check_initial_weights(models: Sequence[Model]) -> None:
    """The same settings and seed give the same names and the same bits every time."""
    for model in models:
        found = []
        for seed in (1, 2):
            with global_seed(seed):
                found.append({"weights": dict(model.module(3).state_dict())})
        require_same(
            found[0],
            found[1],
            "the same names and bits from the same seed",
            "initialize with torch's own generator, which fedloom seeds; not with numpy or random, nor from a counter",
            what="state dict",
        )


@listed_in(MODEL_CHECKS)
def check_backward(models: Sequence[Model]) -> str | None:
    """The loss can be differentiated, and the gradients are finite."""
    unused: list[str] = []
    for model in models:
        module = model.module().train()
        outputs = as_outputs(module(_inputs(model, 4)))
        total = torch.stack([logits.square().sum() for logits in outputs.exits.values()]).sum()
        if not total.requires_grad:
            raise Broken(
                "a loss that can be differentiated", "the logits have no gradient", "no detach, no_grad or argmax"
            )
        names = [name for name, weight in module.named_parameters() if weight.requires_grad]
        weights = [weight for weight in module.parameters() if weight.requires_grad]
        gradients = torch.autograd.grad(total, weights, allow_unused=True)
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is None:
                unused.append(name)
            elif not bool(gradient.isfinite().all()):
                raise Broken("finite gradients", f"that of {name} is not", "look for a square root or a log at zero")
    return f"no exit depends on {', '.join(dict.fromkeys(unused))}, which will not be trained" if unused else None


@listed_in(MODEL_CHECKS)
def check_purity(models: Sequence[Model]) -> None:
    """Forward passes do not change their input, and do not remember earlier ones.

    One module serves all devices in turn, so whatever it remembers would leak from one device to the next.
    """
    for model in models:
        weights = {name: value[:1] for name, value in random_block(model, 1, torch.get_default_dtype()).items()}
        x, other = _inputs(model, 1, 4), _inputs(model, 1, 4, seed=1)
        given = x[0].clone()
        with torch.no_grad():
            model.module().train()(given)
        if not same_bits(x[0], given):
            hint = "use x + y, not x += y; relu(x), not relu_(x)"
            raise Broken("the input stays as it is", "forward changes it in place", hint)
        try:
            model.check_buffers()
        except ValueError as error:
            hint = "a running mean belongs to batch norm, which fedloom handles"
            raise Broken("buffers that training leaves alone", str(error), hint) from error
        first = model(weights, x, StepSeeds((5,))).logits
        model(weights, other, StepSeeds((6,)))
        if not same_bits(first, model(weights, x, StepSeeds((5,))).logits):
            raise Broken(
                "the same output for the same weights and input",
                "the output changes after another batch was seen",
                "keep nothing on self in forward; a running mean belongs to batch norm, which fedloom handles",
            )


@listed_in(MODEL_CHECKS)
def check_devices_apart(models: Sequence[Model]) -> str | None:
    """Many devices in one network get the outputs and gradients that each gets alone, in float64, to 1e-10.

    A faster batching mode is used only after a trial; a note says if the trial ruled it out.
    """
    reasons: list[str] = []
    with default_dtype(torch.float64):
        for model in models:
            block, x = random_block(model, 3), _inputs(model, 3, 4)
            together = _outputs_and_gradients(model, block, x, (10, 11, 12))
            for number in range(3):
                one = {name: weight[number : number + 1] for name, weight in block.items()}
                alone = _outputs_and_gradients(model, one, x[number : number + 1], (10 + number,))
                part = {kind: {n: t[number : number + 1] for n, t in both.items()} for kind, both in together.items()}
                require_same(
                    alone,
                    part,
                    "a device gets in a block what it gets alone",
                    "forward must not look at the size of the batch or at the order of channels",
                    1e-10,
                    "block",
                )
            reasons += model.fallback_reasons()
    return f"slower batching: {'; '.join(dict.fromkeys(reasons))}" if reasons else None


def _outputs_and_gradients(model: Model, weights: Tensors, x: Tensor, seeds: tuple[int, ...]) -> Parcel:
    """All outputs in training, and the gradient of a sum over them."""
    leaves = {name: weights[name].clone().requires_grad_() for name in model.shapes()}
    outputs = model(leaves, x, StepSeeds(seeds))
    named = {f"exit {name}": tensor for name, tensor in outputs.exits.items()}
    named |= {f"tap {name}": tensor for name, tensor in outputs.taps.items()}
    total = torch.stack([(tensor.sin() * (1 + number)).sum() for number, tensor in enumerate(named.values())]).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return {
        "outputs": {name: tensor.detach() for name, tensor in named.items()},
        "gradients": dict(zip(leaves, gradients, strict=True)),
    }


@listed_in(MODEL_CHECKS)
def check_exits(models: Sequence[Model]) -> None:
    """Exits have the same names in the same order for every batch size, in training and in evaluation."""
    for model in models:
        found = set()
        with torch.no_grad():
            for training in (True, False):
                for batch in (2, 5):
                    found.add(tuple(as_outputs(model.module().train(training)(_inputs(model, batch))).exits))
        if len(found) > 1:
            names = " and ".join(map(str, sorted(found)))
            raise Broken(
                "the same exits in every pass", names, "return Outputs(exits, taps) with the same names always"
            )


@listed_in(MODEL_CHECKS)
def check_nesting(models: Sequence[Model]) -> str | None:
    """Every smaller tier lies in the largest one, and its part of that computes what it does; a note says if not."""
    tiers = make_tiers([(f"tiers[{number}]", model) for number, model in enumerate(models)])
    fleet = Fleet(tiers, (1 / len(tiers),) * len(tiers), len(tiers), seed=0)
    problem = find_nesting_problem(fleet)
    if problem:
        return f"not nested, so only methods for unrelated models can train these tiers: {problem}"
    weights = fleet.global_model.initial_weights(0)
    for tier in tiers:
        shapes = {name: part.shape for name, part in tier.footprint.read(weights).items()}
        if shapes != dict(tier.model.shapes()):
            raise Broken("a footprint of the tier's shapes", f"{tier.name}: {shapes}", "give tiers the same layers")
    same = [
        tier.name for tier in tiers if tier is not fleet.largest and tier.model.shapes() == fleet.global_model.shapes()
    ]
    return f"{', '.join(same)} is as large as the largest tier: does the function use its settings?" if same else None


@listed_in(MODEL_CHECKS)
def check_model_trains(models: Sequence[Model]) -> None:
    """FedAvg trains the largest tier for a round, and its model can be evaluated."""
    model, method = models[0], METHODS["fedavg"]()
    world = TinyWorld.make(models=[("a", model)], sizes=(8, 5), classes=model.classes, input_shape=model.input_shape)
    engine = world.engine(method)
    server = world.play(method, engine, rounds=1)
    require_no_refusals(world)
    require_rows(world.evaluate(method, server, engine))
    if not largest_difference(server, method.start(world.fleet, world.seed)) > 0:
        raise Broken("weights that training changes", "no weight changed", "see check_backward")


@listed_in(MODEL_CHECKS)
def check_export(models: Sequence[Model]) -> str | None:
    """A note says if torch.export cannot trace the module, so that `fedloom export` could only write safetensors."""
    model = models[-1]
    try:
        exported_program(build_empty_module(model), _inputs(model, 2))
    except Exception as error:  # a user's module may raise anything
        return f"torch.export fails: {str(error).strip().splitlines()[0] if str(error) else type(error).__name__}"
    return None
