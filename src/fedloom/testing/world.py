"""Models of a few hundred weights, data that is easy to learn, and a fleet of a few devices."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import Parameter, signature
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..client import Constant, Optimizer, Schedule, Sgd
from ..data import TASKS, Dataset, Examples, LearningTask, Partition, Preparation
from ..engines import ClientStateStore, Gate, InProcess, Refusal, build_client_data
from ..evaluation import BatchNormStatistics, Evaluator, Row
from ..fleet import Engine, Fleet, RoundContext, draw_cohort, make_ask, make_tiers
from ..methods import Method, fleet_problem
from ..models import MODELS, Family, Model, build_model
from ..models.structure import as_outputs
from ..settings import FrozenDict
from ..tensors import Parcel

TINY_SETTINGS: dict[str, dict[str, Any]] = {
    "bottleneck": {"stem": 4, "planes": (3, 4), "blocks": (1, 2)},
    "columnnet": {"columns": ((3, 4), (2, 3))},
    "convnet": {"hidden": (4, 6)},
    "convnet1d": {"hidden": (4, 6), "kernel": 3},
    "lenet": {"convs": (4,), "kernels": (5,), "hidden": (6,)},
    "lstm": {"embedding": 5, "hidden": 4, "features": 6, "dropout": 0.0},
    "mlp": {"hidden": (6, 5)},
    "mobilenet": {"stem": 3, "widths": (4, 6), "depths": (1, 2), "kernels": (5, 5)},
    "preactresnet": {"hidden": (4, 6), "blocks": (1, 1), "exit_after": 1},
    "preresnet": {"hidden": (3, 4), "blocks": (1, 1)},
    # with fewer channels or more blocks, on maps of one pixel, differences of rounding grow from step to step
    "splitnet": {"channels": 4, "extra": (1, 0), "conv_bias": False},
    "transformer": {"embedding": 4, "heads": 2, "hidden": 6, "layers": 2, "exit_after": 1, "dropout": 0.0},
    "unet": {"hidden": (4, 6), "groups": 2, "early_exit": True},
}
"""Settings with which a built-in family has a few hundred weights."""

SMALLER_SETTINGS: dict[str, dict[str, Any]] = {
    "columnnet": {"held": 1},
    "mobilenet": {"depths": (1, 1), "kernels": (5, 3)},
    "preactresnet": {"stages": 1},
    "splitnet": {"extra": (0, 0)},
    "transformer": {"depth": 1},
    "unet": {"decoder": False},
}
"""What is smaller in the lower tiers of a family, beside its width."""

TINY_METHODS: dict[str, dict[str, Any]] = {
    "fedgkt": {"server_epochs": 1, "server_batch": 8, "server_planes": (2,), "server_blocks": (1,)},
    "fedhenn": {"strength": 0.5, "growth": "none", "probe_size": 6},
    "depthfl": {"ramp_up": 2},
    "fedin": {"pairs": 4, "batch": 6},
    "fedtgp": {"server_epochs": 3},
    "fiarse": {"sizes": FrozenDict(a=0.6, b=0.25)},
    "mixed": {
        "strength": 0.5,
        "growth": "none",
        "probe_size": 6,
        "parts": (
            {"tiers": ("a",), "method": "heterofl"},
            {"tiers": ("b",), "method": "fedhenn", "align": True, "probe_size": 5, "strength": 0.2, "growth": "none"},
        ),
    },
}
"""Settings without which a built-in method would not be tiny, or would not show what it does."""

SERIES_FAMILIES = ("convnet1d",)
"""Families for time series [channels, length]; others of numbers take images."""

FAMILY_TASKS = {"unet": "segmentation"}
"""What a family learns, where it is not one class or number for every example or a word for every token."""

CHAOTIC_FAMILIES = ("mobilenet", "splitnet")
"""Tiny families in which differences of rounding grow from step to step."""


def tiny_model(
    model: str | Family = "convnet",
    input_shape: tuple[int, ...] = (1, 6, 6),
    classes: int = 4,
    width: float = 1.0,
    task: "str | LearningTask | None" = None,
    **settings: Any,
) -> Model:
    """A model of a few hundred weights.

    Parameters
    ----------
    model
        The name of a built-in family, or a function from keyword settings to a module.
    input_shape
        Of one example. Families with a parameter `tokens` get sequences of five tokens instead, and those for time
        series one channel with all the numbers.
    classes
        How many logits it has. There is one token id more, for the mask.
    width
        Passed on if the family has a parameter `width`.
    task
        What it learns; by default what the family is for.
    **settings
        Further settings of the family, instead of those that make it tiny.

    Returns
    -------
    Model

    Examples
    --------
    >>> from fedloom.testing import tiny_model
    >>> sum(shape.numel() for shape in tiny_model("mlp").shapes().values())
    281
    """
    name, build = find_family(model)
    known = signature(build).parameters
    chosen = {**TINY_SETTINGS.get(name, {}), "width": width, **settings}
    for optional in ("normalization", "width", "widest"):
        if not takes_setting(known, optional):
            chosen.pop(optional, None)
    if "tokens" in known:
        return build_model(name, build, chosen, (5,), classes, classes + 1)
    learned = find_task(task or family_task(name, build))
    outputs, shape = 1 if learned.target == "number" else classes, tiny_shape(name, input_shape)
    if learned.positions != "pixels":
        return build_model(name, build, chosen, shape, outputs)
    positions = shape[-2:]
    return build_model(name, build, chosen, shape, outputs, target_shape=positions, class_axis=learned.class_axis)


def family_task(name: str, build: Family) -> str | None:
    """What a built-in family learns, where it is not the usual; None for all others, whatever they are called."""
    return FAMILY_TASKS.get(name) if MODELS.get(name) is build else None


def _task_of(model: Model) -> str | None:
    """What a model's outputs are for: a class for every pixel, or the usual."""
    return "segmentation" if len(model.target_shape or ()) == 2 else None


def find_task(task: "str | LearningTask | None") -> LearningTask:
    """A task by its name; classification by default."""
    return task if isinstance(task, LearningTask) else TASKS[task or "classification"]


def tiny_shape(family: str, input_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an example for a built-in family: of images, or with all their pixels in a row.

    Parameters
    ----------
    family
        The name of the family.
    input_shape
        Of one image.
    """
    is_image = family in SERIES_FAMILIES and len(input_shape) == 3
    return (input_shape[0], math.prod(input_shape[1:])) if is_image else input_shape


def find_family(model: str | Family) -> tuple[str, Family]:
    if isinstance(model, str):
        return model, MODELS[model]
    return next((name for name, build in MODELS.items() if build is model), name_of(model)), model


def takes_setting(parameters: Mapping[str, Parameter], name: str) -> bool:
    return name in parameters or any(one.kind is Parameter.VAR_KEYWORD for one in parameters.values())


def name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _spread_labels(sizes: Sequence[int], labels: Sequence[Sequence[int]]) -> Tensor:
    """Device after device, its own labels in turn."""
    return torch.cat(
        [torch.tensor(own)[torch.arange(size) % len(own)] for size, own in zip(sizes, labels, strict=True)]
    )


def consecutive_rows(sizes: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Row numbers of devices that hold so many examples, one after the other."""
    ends = np.cumsum([0, *sizes])
    return tuple(np.arange(start, end) for start, end in pairwise(ends))


def _noisy_images(labels: Tensor, shape: tuple[int, ...], seed: int) -> Tensor:
    """A pattern for each label under noise, as bytes."""
    draw = torch.Generator().manual_seed(seed)
    patterns = torch.randint(0, 128, (int(labels.max()) + 1, *shape), generator=torch.Generator().manual_seed(99))
    return (patterns[labels] + torch.randint(0, 128, (len(labels), *shape), generator=draw)).to(torch.uint8)


def _image_examples(
    shape: tuple[int, ...], labels: Sequence[Sequence[int]], sizes: Sequence[int], seed: int
) -> Examples:
    answers = _spread_labels(sizes, labels)
    return Examples(_noisy_images(answers, shape, seed), answers)


def _with_targets(examples: Examples, task: LearningTask, classes: int) -> Examples:
    """The same examples with other targets than labels, which follow from their labels."""
    x, labels = examples.x, examples.y
    if task.target == "number":
        return Examples(x, (labels - (classes - 1) / 2).float())
    if task.target == "labels":  # two of them: the label itself and the next one
        flags = torch.nn.functional.one_hot(labels, classes)
        return Examples(x, (flags | flags.roll(1, 1)).float())
    if task.positions == "pixels":  # bright pixels are of the label's class, dark ones of class 0
        return Examples(x, torch.where(x[:, 0] > 128, labels[:, None, None], 0))
    return examples


def _token_examples(model: Model, labels: Sequence[Sequence[int]], sizes: Sequence[int], seed: int) -> Examples:
    """Rows of tokens. If the model labels every token, each is its own label; else a row has one."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        labels_tokens = as_outputs(model.module().eval()(model.zero_inputs(1))).logits.dim() == 3
    if labels_tokens:
        rows = [
            torch.tensor(list(own))[torch.randint(0, len(own), (size, *model.input_shape), generator=draw)]
            for size, own in zip(sizes, labels, strict=True)
        ]
        return Examples(torch.cat(rows), torch.cat(rows))
    answers = _spread_labels(sizes, labels)
    noise = torch.randint(0, 2, (len(answers), *model.input_shape), generator=draw)
    return Examples((answers.unsqueeze(1) + noise) % model.classes, answers)


@dataclass(frozen=True)
class TinyWorld:
    """A fleet of a few devices, its data and how it trains: all that a method needs to be played in milliseconds.

    Parameters
    ----------
    fleet
        Tiers and devices.
    dataset
        Examples of the devices, and the test set.
    partition
        Which examples each device holds.
    schedule
        Epochs and batch size.
    optimizer
        Of the devices.
    seed
        Of everything that is drawn.
    devices_per_block
        How many devices run as one network, unless `engine` is asked for another number.
    refusals
        Replies that the gate of an engine of this world has refused; it grows.

    Examples
    --------
    >>> from fedloom.methods.heterofl import HeteroFL
    >>> from fedloom.testing import TinyWorld
    >>> world, method = TinyWorld.make(widths=(1.0, 0.5)), HeteroFL()
    >>> server = world.play(method, world.engine(method), rounds=2)
    >>> sorted(server)
    ['weights']
    """

    fleet: Fleet
    dataset: Dataset
    partition: Partition
    schedule: Schedule
    optimizer: Optimizer
    seed: int = 0
    devices_per_block: int = 16
    refusals: list[Refusal] = field(default_factory=list, compare=False)

    @staticmethod
    def make(
        model: str | Family = "convnet",
        widths: Sequence[float] = (1.0,),
        sizes: Sequence[int] = (8, 8, 8),
        labels: Sequence[Sequence[int]] | None = None,
        test_sizes: Sequence[int] | None = None,
        shares: Sequence[float] | None = None,
        schedule: Schedule | None = None,
        optimizer: Optimizer | None = None,
        input_shape: tuple[int, ...] = (1, 6, 6),
        classes: int = 4,
        preparation: Preparation | None = None,
        models: Sequence[tuple[str, Model]] | None = None,
        task: "str | LearningTask | None" = None,
        **settings: Any,
    ) -> "TinyWorld":
        """Build a world. Its examples are a pattern per label under noise, or short sequences of tokens.

        Parameters
        ----------
        model
            The name of a built-in family, or a function from keyword settings to a module.
        widths
            The width of every tier; tiers are named a, b, … in this order.
        sizes
            How many training examples each device holds.
        labels
            The labels that each device holds; by default all.
        test_sizes
            How many test examples each device holds; by default half as many, and one.
        shares
            The share of each tier; by default equal.
        schedule, optimizer
            By default one epoch in batches of four, and SGD with momentum.
        input_shape, classes
            Of the examples, unless they are tokens.
        preparation
            Of examples for the model; by default images are normalized and tokens masked.
        models
            The name and the model of every tier, instead of `model` and `widths`.
        task
            What is learned: the name of a task, or a `LearningTask`; by default what the model is for.
        **settings
            Further settings of the model.

        Returns
        -------
        TinyWorld
        """
        labels = labels or [range(classes)] * len(sizes)
        test_sizes = test_sizes or [size // 2 + 1 for size in sizes]
        family = models[0][1].family if models else find_family(model)[0]
        if task is None:
            task = _task_of(models[0][1]) if models else family_task(*find_family(model))
        smaller = SMALLER_SETTINGS.get(family, {})
        models = models or [
            (
                name,
                tiny_model(model, input_shape, classes, width, task, **{"widest": max(widths), **less, **settings}),
            )
            for name, width in zip("abcdef", widths, strict=False)
            for less in [smaller if width < max(widths) else {}]
        ]
        tokens = models[0][1].tokens
        make = (
            partial(_token_examples, models[0][1], labels)
            if tokens
            else partial(_image_examples, tiny_shape(models[0][1].family, input_shape), labels)
        )
        usual = Preparation(mask_chance=0.2, mask_token=classes) if tokens else Preparation((0.4,), (0.3,))
        train, test = make(sizes, 0), make(test_sizes, 1)
        if not tokens:
            train, test = (_with_targets(part, find_task(task), classes) for part in (train, test))
        dataset = Dataset("toy", train, test, models[0][1].classes, preparation or usual, tokens)
        return TinyWorld(
            fleet=Fleet(make_tiers(models), tuple(shares or [1 / len(models)] * len(models)), len(sizes), seed=0),
            dataset=dataset if task is None else replace(dataset, task=find_task(task)),
            partition=Partition(consecutive_rows(sizes), consecutive_rows(test_sizes)),
            schedule=schedule or Schedule(batch_size=4),
            optimizer=optimizer or Sgd(0.1, momentum=0.9, weight_decay=5e-4, clip_norm=1.0),
        )

    @staticmethod
    def for_method(method: Method, model: str | Family | None = None, **changes: Any) -> "TinyWorld":
        """Build a world that a method can train: of two tiers if it takes them, else of one.

        Parameters
        ----------
        method
            The method to play.
        model
            A family, or a function that builds one; by default the first built-in family that the method takes.
        **changes
            Further arguments of `TinyWorld.make`.

        Returns
        -------
        TinyWorld

        Raises
        ------
        ValueError
            If the method's `check_task` refuses the task, or its `check_fleet` every fleet that was tried, with the
            reason.
        """
        wanted = changes.get("task")
        task = None if wanted is None else find_task(wanted)
        problem = None if task is None else method.check_task(task)
        if problem is not None:
            raise ValueError(problem)
        chosen = home_family(method, task) if model is None else model
        several = TinyWorld.make(chosen, widths=(1.0, 0.5), **changes)
        smaller = SMALLER_SETTINGS.get(find_family(chosen)[0])
        if smaller and fleet_problem(method, several.fleet) is not None:  # not narrower, but less deep
            shape, classes = several.dataset.input_shape, changes.get("classes", 4)
            sizes = [
                (name, tiny_model(chosen, shape, classes, task=task, **less))
                for name, less in (("a", {}), ("b", smaller))
            ]
            several = TinyWorld.make(models=sizes, **changes)
        if fleet_problem(method, several.fleet) is None:
            return several
        one = TinyWorld.make(chosen, **changes)
        problem = fleet_problem(method, one.fleet)
        if problem is not None:
            raise ValueError(f"{type(method).__name__} refuses every tiny fleet of {find_family(chosen)[0]}: {problem}")
        return one

    def engine(self, method: Method, devices_per_block: int | None = None, **changes: Any) -> InProcess:
        """An in-process engine with the devices of this world.

        Parameters
        ----------
        method
            The method whose devices start with `init_client`.
        devices_per_block
            How many devices run as one network; by default as the world says.
        **changes
            Other fields of `InProcess`.

        Returns
        -------
        InProcess
        """
        made = InProcess(
            client_data=build_client_data(self.dataset, self.partition, self.fleet),
            client_states=ClientStateStore(lambda device: method.init_client(device, self.seed)),
            schedule=self.schedule,
            optimizer=self.optimizer,
            lr_schedule=Constant(),
            seed=self.seed,
            devices_per_block=devices_per_block or self.devices_per_block,
            gate=Gate(lambda round_number, refusal: self.refusals.append(refusal)),
        )
        return replace(made, **changes)

    @property
    def public(self) -> Tensor:
        """What the server has: examples like the devices', but none of theirs."""
        shape = tuple(self.dataset.train.x.shape[1:])
        if self.dataset.tokens:
            return torch.randint(0, self.dataset.tokens, (12, *shape), generator=torch.Generator().manual_seed(7))
        return _noisy_images(torch.arange(12) % self.dataset.classes, shape, seed=7)

    def context(self, engine: Engine, number: int = 1, participation: float = 1.0) -> RoundContext:
        """What a method gets in a round.

        Parameters
        ----------
        engine
            Carries the requests.
        number
            Of the round, from 1.
        participation
            The share of the devices in the cohort.

        Returns
        -------
        RoundContext
        """
        cohort = draw_cohort(self.fleet, participation, number)
        return RoundContext(number, cohort, self.fleet, engine, public=self.public)

    def play(self, method: Method, engine: Engine, rounds: int = 2, participation: float = 1.0) -> Parcel:
        """Play the rounds of a run, without evaluation.

        Parameters
        ----------
        method, engine
            What to play, and where.
        rounds
            How many rounds.
        participation
            The share of the devices in every cohort.

        Returns
        -------
        Parcel
            The last server state.
        """
        server = method.start(self.fleet, self.seed)
        for number in range(1, rounds + 1):
            server = method.round(server, self.context(engine, number, participation))
            engine.commit(number)
        return server

    def evaluator(self, statistics: BatchNormStatistics | None = None, **changes: Any) -> Evaluator:
        """An evaluator on the test sets of this world.

        Parameters
        ----------
        statistics
            How statistics of batch norm are collected.
        **changes
            Other fields of `Evaluator`.

        Returns
        -------
        Evaluator
        """
        held = build_client_data(self.dataset, self.partition, self.fleet)
        made = Evaluator(
            dataset=self.dataset,
            local_tests=[torch.from_numpy(rows) for rows in self.partition.test],
            seen_labels=torch.stack([held.seen_labels(device) for device in self.fleet.devices(1)]),
            statistics=statistics or BatchNormStatistics(batch_size=5),
            seed=self.fleet.seed,
        )
        return replace(made, **changes)

    def evaluate(self, method: Method, server: Parcel, engine: Engine, number: int = 1) -> list[Row]:
        """Evaluate all targets of a method, on the test set and on every device.

        Parameters
        ----------
        method, server
            Whose `eval_targets`, and in which server state.
        engine
            Where device models are.
        number
            Of the round.

        Returns
        -------
        list of Row
        """
        targets = method.eval_targets(server)
        return self.evaluator().rows(targets, self.fleet, make_ask(engine, number), number, True)


def takes_family(method: Method, model: str | Family, task: LearningTask | None = None) -> bool:
    """True if a method trains a tiny fleet of a family, of two widths or of one."""
    fleets = (TinyWorld.make(model, widths, task=task).fleet for widths in ((1.0,), (1.0, 0.5)))
    return any(fleet_problem(method, fleet) is None for fleet in fleets)


def home_family(method: Method, task: LearningTask | None = None) -> str:
    """The family to try a method with: a convolutional one if it takes that and can learn the task."""
    families = [name for name in ("convnet", "splitnet", "preactresnet", *sorted(MODELS)) if _can_learn(name, task)]
    home = next((family for family in families if takes_family(method, family, task)), None)
    if home is None:
        first = families[0]
        problem = fleet_problem(method, TinyWorld.make(first, task=task).fleet)
        raise ValueError(f"{type(method).__name__} refuses every built-in family; {first}, because: {problem}")
    return home


def _can_learn(family: str, task: LearningTask | None) -> bool:
    """True for a family whose outputs are such as the task needs."""
    if family not in TINY_SETTINGS:
        return False
    positions = "pixels" if FAMILY_TASKS.get(family) == "segmentation" else ""
    if task is None:
        return not positions
    takes_tokens = "tokens" in signature(MODELS[family]).parameters
    if task.is_sequence or takes_tokens:
        return task.is_sequence and family == "transformer"
    return task.positions == positions
