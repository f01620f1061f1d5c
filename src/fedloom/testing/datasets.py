"""The contract of a data set."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..client import Schedule, Sgd
from ..data import IGNORED, PARTITIONS, DataBroken, Dataset, Partition, as_dataset, extract_labels
from ..data.checks import count_shared_rows
from ..fleet import Fleet, make_tiers
from ..methods import METHODS
from ..models import MODELS, build_model
from ..tensors import all_finite, raw_bytes
from .methods import require_no_refusals, require_rows
from .report import (
    DATASET_CHECKS,
    Broken,
    CheckFailed,
    CheckReport,
    describe_error,
    hint_of,
    listed_in,
    run_checks,
    same_bits,
)
from .world import TINY_SETTINGS, TinyWorld, name_of


def check_dataset(loader: Callable[..., Any], **options: Any) -> CheckReport:
    """Check that a function loads a data set that can be divided over devices and trained on.

    Parameters
    ----------
    loader
        A function from keyword options to a `Dataset`, or to anything else that `as_dataset` takes. It is called twice.
    **options
        Passed on to it.

    Returns
    -------
    CheckReport
        Its notes warn of classes without training examples and of test examples that are also training examples.

    Raises
    ------
    CheckFailed
        By the first check that does not pass.

    Examples
    --------
    >>> from fedloom.data import DATASETS
    >>> from fedloom.testing import check_dataset
    >>> len(check_dataset(DATASETS["digits"]).passed) > 5
    True
    """
    try:
        found = loader(**options), loader(**options)
    except DataBroken as error:  # Dataset itself looks at labels, tokens and groups
        raise CheckFailed("check_labels", "a valid Dataset", describe_error(error), error.hint) from error
    except Exception as error:
        raise CheckFailed("check_loading", "a Dataset", describe_error(error), hint_of(error)) from error
    try:
        dataset, again = (as_dataset(one, name=name_of(loader)) for one in found)
    except DataBroken as error:
        expected = "a fedloom.data.Dataset, or what as_dataset takes"
        raise CheckFailed("check_loading", expected, describe_error(error), error.hint) from error
    return run_checks(str(getattr(dataset, "name", name_of(loader))), DATASET_CHECKS, dataset, again)


@listed_in(DATASET_CHECKS)
def check_loading(dataset: Dataset, again: Dataset) -> None:
    """Loading twice gives the same examples, groups and preparation, in the same order."""
    hint = "sort file names, and shuffle with a seed of your own only"
    if dataset.fingerprint() != again.fingerprint():
        raise Broken(
            "the same fingerprint every time", f"{dataset.fingerprint()[:12]} and {again.fingerprint()[:12]}", hint
        )
    groups = [() if one.groups is None else tuple(map(raw_bytes, one.groups)) for one in (dataset, again)]
    if groups[0] != groups[1] or dataset.preparation != again.preparation:
        raise Broken("the same groups and preparation every time", "they differ", hint)


@listed_in(DATASET_CHECKS)
def check_labels(dataset: Dataset, again: Dataset) -> str | None:
    """Labels are int64 from 0 to classes - 1, or other targets such as the task needs; tokens are below `tokens`, and
    there is a group for every example."""
    replace(dataset)  # validates again, in case tensors were changed since
    if dataset.task.target == "number":
        constant = bool((dataset.train.y == dataset.train.y[:1]).all())
        return "all training examples have the same target" if constant else None
    if dataset.task.target == "labels":
        empty = (~dataset.train.y.bool().any(0)).nonzero().flatten().tolist()
        return f"no training example has {len(empty)} of the labels, such as {empty[0]}" if empty else None
    present = set(dataset.train.y.unique().tolist()) - {IGNORED}
    missing = sorted(set(range(dataset.classes)) - present)
    return (
        f"no training example of {len(missing)} of {dataset.classes} classes, such as {missing[0]}" if missing else None
    )


@listed_in(DATASET_CHECKS)
def check_examples(dataset: Dataset, again: Dataset) -> None:
    """Training and test examples have one shape and dtype, which is bytes, floats or tokens, and are finite."""
    train, test = dataset.train.x, dataset.test.x
    if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
        found = " and ".join(f"{tuple(x.shape[1:])} {x.dtype}" for x in (train, test))
        raise Broken("training and test examples of one shape and dtype", found, "read both in the same way")
    if dataset.tokens is None and train.dtype != torch.uint8 and not train.is_floating_point():
        raise Broken("bytes or floats", f"{train.dtype}", "use uint8 for images; give `tokens` if these are token ids")
    for part, x in (("training", train), ("test", test)):
        if x.device.type != "cpu" or x.requires_grad:
            raise Broken("plain tensors on the CPU", f"{part} examples on {x.device}", "engines move what they need")
        if not all_finite([x]):
            raise Broken("finite numbers", f"a {part} example holds NaN or infinity", "fill in missing values")


@listed_in(DATASET_CHECKS)
def check_preparation(dataset: Dataset, again: Dataset) -> None:
    """Preparation turns stored examples into one shape of finite inputs, in training and in evaluation.

    The same draws give the same inputs, and the stored examples stay as they are.
    """
    stored = dataset.train.x[:4]
    before = stored.clone()
    draws = [
        dataset.preparation.draw_augmentation(np.random.default_rng(1), len(stored), *stored.shape[1:])
        for _ in range(2)
    ]
    plain, *augmented = (dataset.preparation(stored, draw) for draw in (None, *draws))
    if not same_bits(stored, before):
        raise Broken("stored examples stay as they are", "preparation changes them in place", "return a new tensor")
    if not same_bits(augmented[0], augmented[1]):
        raise Broken("the same inputs from the same draws", "they differ", "draw in draw_augmentation only")
    if plain.shape != augmented[0].shape or tuple(plain.shape[1:]) != dataset.input_shape:
        found = f"{tuple(augmented[0].shape[1:])} in training, {tuple(plain.shape[1:])} in evaluation"
        raise Broken(f"inputs of shape {dataset.input_shape}", found, "crop and resize to one size")
    if not all_finite([plain, augmented[0]]):
        raise Broken("finite inputs", "NaN or infinity", "check mean and std")


@listed_in(DATASET_CHECKS)
def check_separation(dataset: Dataset, again: Dataset) -> str | None:
    """A note says how many test examples are also training examples."""
    both = count_shared_rows(dataset.train.x, dataset.test.x)
    return f"{both} of {len(dataset.test)} test examples are also training examples" if both else None


@listed_in(DATASET_CHECKS)
def check_partitions(dataset: Dataset, again: Dataset) -> None:
    """Its examples can be divided over devices: at random and, if it has groups, by group."""
    labels = extract_labels(dataset)
    kinds = ["iid"] + ["natural"] * (dataset.groups is not None)
    for kind in kinds:
        known = len(dataset.train) if kind == "iid" or dataset.groups is None else len(dataset.groups[0].unique())
        devices = min(4, known, len(dataset.test))
        partition = PARTITIONS[kind](labels, devices, np.random.default_rng(0))
        for rows, examples in ((partition.train, dataset.train), (partition.test, dataset.test)):
            held = np.concatenate(rows)
            if len(set(held.tolist())) < len(held) or (len(held) and int(held.max()) >= len(examples)):
                raise Broken(f"{kind}: every example on one device at most", "an example twice, or beyond the last", "")


@listed_in(DATASET_CHECKS)
def check_dataset_trains(dataset: Dataset, again: Dataset) -> None:
    """Two devices with a few examples each train a small network for a round, and it can be evaluated."""
    family = "mlp" if dataset.tokens is None else ("transformer" if dataset.task.is_sequence else "lstm")
    family = "unet" if dataset.task.positions == "pixels" else family
    settings = {**TINY_SETTINGS[family], "width": 1.0}
    model = build_model(
        family, MODELS[family], settings, dataset.input_shape, dataset.classes, dataset.tokens, dataset.target_shape,
        dataset.task.class_axis,
    )  # fmt: skip
    small = replace(dataset.limit_test_examples(8), vocabulary=())
    tests = len(small.test) // 2
    rows = tuple(np.arange(first, min(first + 4, len(small.train))) for first in (0, len(small.train) // 2))
    world = TinyWorld(
        fleet=Fleet(make_tiers([("a", model)]), (1.0,), 2, seed=0),
        dataset=small,
        partition=Partition(rows, (np.arange(tests), np.arange(tests, len(small.test)))),
        schedule=Schedule(batch_size=4),
        optimizer=Sgd(0.01),
    )
    method = METHODS["fedavg"]()
    engine = world.engine(method)
    server = world.play(method, engine, rounds=1)
    require_no_refusals(world)
    require_rows(world.evaluate(method, server, engine))
