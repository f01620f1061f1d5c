"""A data set: training and test examples, what is learned from them, and the preparation for a model.

Examples stay as they are stored (images as bytes), which takes a quarter of the memory of floats.
"""

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .preparation import Preparation
from .tasks import LearningTask, infer_task


class DataError(Exception):
    """A problem with a data set.

    Parameters
    ----------
    message : what is wrong.
    hint : how to fix it.
    """

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}"


class DataMissing(DataError):  # noqa: N818 - named for what is wrong
    """A data set, or one of its files, does not exist."""


class DataBroken(DataError):  # noqa: N818 - named for what is wrong
    """A file exists but its content is invalid."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs and their targets, the same number of each; numpy arrays become tensors.

    Parameters
    ----------
    x : images, uint8 or float [n, channels, height, width]; time series [n, channels, length]; rows [n, features];
        text, int64 [n, length].
    y : labels, int64 [n], [n, length] if every token has one, or [n, height, width] if every pixel has one; for
        multi-label tasks 0 or 1, [n, labels]; numbers, float32 [n] or [n, outputs].
    """

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        for name in ("x", "y"):
            object.__setattr__(self, name, _as_tensor(getattr(self, name), f"the {_PARTS[name]}"))
        if len(self.x) != len(self.y):
            raise DataBroken(f"{len(self.x)} inputs but {len(self.y)} labels", "Give every example one label.")

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a test set, with labels 0 .. classes - 1 or other targets.

    Parameters
    ----------
    name : what reports call it.
    train : the training examples.
    test : the test examples.
    classes : the number of classes, or of the labels or numbers that are predicted for every example.
    preparation : how stored examples become a model's input.
    tokens : for text, the number of different token ids, including the mask.
    groups : the group of every training and every test example, such as a user; a number is the same group in both.
    vocabulary : for text, the word of each token.
    deviation : how its counts differ from those of the published data set of that name; "" if they do not.
    class_names : the name of each class; (): they have none.
    task : what is learned; None: what the targets suggest. It is never None afterwards.
    """

    name: str
    train: Examples
    test: Examples
    classes: int
    preparation: Preparation
    tokens: int | None = None
    groups: tuple[Tensor, Tensor] | None = None
    vocabulary: tuple[str, ...] = ()
    deviation: str = ""
    class_names: tuple[str, ...] = ()
    task: LearningTask = None  # type: ignore[assignment]  # inferred below

    def __post_init__(self) -> None:
        _check_parts(self.name, self.train, self.test, self.preparation)
        object.__setattr__(self, "class_names", _check_class_names(self.name, self.class_names, self.classes))
        object.__setattr__(self, "preparation", _fit_preparation(self.name, self.preparation, self.train.x))
        masks_tokens = self.preparation.mask_token is not None
        task = self.task or infer_task(self.train.x, self.train.y, masks_tokens)
        object.__setattr__(self, "task", task)
        for name in ("train", "test"):
            object.__setattr__(self, name, _with_plain_targets(getattr(self, name), task))
        for part, examples, index in (("training", self.train, 0), ("test", self.test, 1)):
            subject = f"the {part} set of {self.name}"
            _check_targets(subject, examples, self.classes, task)
            if self.tokens is not None:
                _check_tokens(subject, examples.x, self.tokens)
            if self.groups is not None:
                _check_groups(subject, self.groups[index], len(examples))
        if self.vocabulary and len(self.vocabulary) != self.tokens:
            message = f"{self.name} has {self.tokens} tokens but {len(self.vocabulary)} words for them"
            raise DataBroken(message, "Give every token a word, or give none.")

    @property
    def target_shape(self) -> tuple[int, ...]:
        """The tokens or pixels of one example that have a target each; () for targets of whole examples."""
        return tuple(self.test.y.shape[1:]) if self.task.positions else ()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one prepared example, e.g. (1, 28, 28)."""
        return tuple(self.preparation(self.train.x[:1]).shape[1:])

    def limit_test_examples(self, count: int) -> "Dataset":
        """The same data set with only the first test examples.

        Parameters
        ----------
        count : how many to keep.
        """
        test = Examples(self.test.x[:count], self.test.y[:count])
        return replace(self, test=test, groups=self.groups and (self.groups[0], self.groups[1][:count]))

    def with_validation_split(self, rows: Tensor) -> "Dataset":
        """Replace the test set by some training examples, which are removed from the training set.

        Parameters
        ----------
        rows : these examples.
        """
        remaining = torch.ones(len(self.train), dtype=torch.bool)
        remaining[rows] = False
        train, test = (Examples(self.train.x[part], self.train.y[part]) for part in (remaining, rows))
        return replace(
            self, train=train, test=test, groups=self.groups and (self.groups[0][remaining], self.groups[0][rows])
        )

    def fingerprint(self) -> str:
        """The sha256 of all examples and labels, with their shapes and dtypes."""
        digest = hashlib.sha256()
        for tensor in (self.train.x, self.train.y, self.test.x, self.test.y):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


_PARTS = {"x": "inputs", "y": "labels"}


def _as_tensor(values: Any, subject: str) -> Tensor:
    """Numpy's numbers as a tensor, integers other than bytes as int64; a tensor as it is."""
    if isinstance(values, Tensor):
        return values
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "uifb":
        found = f"an array of {values.dtype}" if isinstance(values, np.ndarray) else type(values).__name__
        hint = "Examples(x, y) takes tensors or numpy arrays; fedloom.data.as_dataset takes more."
        raise DataBroken(f"{subject} are {found}, not a tensor of numbers", hint)
    whole = values.dtype.kind in "ui" and values.dtype != np.uint8
    return torch.from_numpy(np.array(values, dtype=np.int64 if whole else values.dtype, order="C"))


def _check_parts(name: str, train: Any, test: Any, preparation: Any) -> None:
    for part, examples in (("train", train), ("test", test)):
        if not isinstance(examples, Examples):
            hint = "Write Dataset(name, Examples(x, y), Examples(x_test, y_test), classes, preparation)."
            raise DataBroken(f"`{part}` of {name} is {type(examples).__name__}, not Examples", hint)
    if not isinstance(preparation, Preparation):
        hint = "Pass Preparation() to leave inputs as they are."
        raise DataBroken(f"`preparation` of {name} is {type(preparation).__name__}, not a Preparation", hint)


def _check_class_names(name: str, class_names: Any, classes: int) -> tuple[str, ...]:
    names = tuple(class_names)
    if isinstance(class_names, str) or any(not isinstance(one, str) or not one for one in names):
        raise DataBroken(f"the class names of {name} are not all text", 'Give them as ("cat", "dog", ...).')
    if names and len(names) != classes:
        message = f"{name} has {classes} classes but {len(names)} names for them"
        raise DataBroken(message, "Give every class a name, in the order of the labels, or give none.")
    if len(set(names)) < len(names):
        twice = next(one for one in names if names.count(one) > 1)
        raise DataBroken(f"two classes of {name} are called {twice!r}", "Give every class a name of its own.")
    return names


def _fit_preparation(name: str, preparation: Preparation, x: Tensor) -> Preparation:
    is_text = x.dtype != torch.uint8 and not x.is_floating_point()
    try:
        return preparation.for_shape(tuple(x.shape[1:]), is_text)
    except ValueError as error:
        hint = "Leave that step out; examples are [n, channels, height, width], [n, channels, length] or [n, features]."
        raise DataBroken(f"{name}: {error}", hint) from error


def _with_plain_targets(examples: Examples, task: LearningTask) -> Examples:
    """Labels that are true or false become 1 and 0, and numbers of double precision single ones."""
    y = examples.y
    if task.target == "class" or y.dtype == task.dtype or not (y.is_floating_point() or y.dtype == torch.bool):
        return examples
    return Examples(examples.x, y.to(task.dtype))


def _check_targets(subject: str, examples: Examples, classes: int, task: LearningTask) -> None:
    if len(examples) == 0:
        raise DataBroken(f"{subject} is empty", "A data set needs examples to train on and examples to test on.")
    problem = task.find_problem(examples.x, examples.y, classes)
    if problem:
        message, hint = problem
        raise DataBroken(f"{subject} has {message}", hint)


def _check_tokens(subject: str, x: Tensor, tokens: int) -> None:
    if x.dtype != torch.int64:
        raise DataBroken(f"{subject} has tokens of type {x.dtype}", "Tokens are torch.int64.")
    lowest, highest = int(x.min()), int(x.max())
    if lowest < 0 or highest >= tokens:
        hint = f"With {tokens} tokens they run from 0 to {tokens - 1}."
        raise DataBroken(f"{subject} has tokens from {lowest} to {highest}", hint)


def _check_groups(subject: str, groups: Tensor, examples: int) -> None:
    if groups.dtype != torch.int64 or groups.shape != (examples,):
        shape = f"{groups.dtype} {tuple(groups.shape)}"
        raise DataBroken(f"{subject} has groups {shape} for {examples} examples", "Groups are torch.int64, one each.")
