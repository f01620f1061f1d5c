"""What a data set is: two bundles of examples, how many labels there are, and how a model gets to see them.

Examples stay as they are stored (images as bytes), so a data set takes a quarter of the memory of its floats.
"""

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .preparation import Preparation


class DataError(Exception):
    """`hint` says how to mend it."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}"


class DataMissing(DataError):  # noqa: N818 - named for what is wrong
    """A data set, or a file of it, is not there."""


class DataBroken(DataError):  # noqa: N818 - named for what is wrong
    """A file is there but is not what it should be."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs and their labels, the same number of each; images are uint8 [n, channels, height, width].

    Text is int64 [n, length]; its labels are [n], or [n, length] where there is a word to tell at every place.
    """

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise DataBroken(f"{len(self.x)} inputs but {len(self.y)} labels", "Give every example one label.")

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a test set with labels 0 .. classes - 1.

    Text says how many different `tokens` a model may see, the mask included, and which word each one is. `groups` says
    of every training and every test example where it comes from, such as a row of text or a user; a number means the
    same group in both.
    """

    name: str
    train: Examples
    test: Examples
    classes: int
    preparation: Preparation
    tokens: int | None = None
    groups: tuple[Tensor, Tensor] | None = None
    vocabulary: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for part, examples, place in (("training", self.train, 0), ("test", self.test, 1)):
            what = f"the {part} set of {self.name}"
            _check_labels(what, examples, self.classes)
            if self.tokens is not None:
                _check_tokens(what, examples.x, self.tokens)
            if self.groups is not None:
                _check_groups(what, self.groups[place], len(examples))
        if self.vocabulary and len(self.vocabulary) != self.tokens:
            said = f"{self.name} has {self.tokens} tokens but {len(self.vocabulary)} words for them"
            raise DataBroken(said, "Give every token a word, or give none.")

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one prepared example, e.g. (1, 28, 28)."""
        return tuple(self.preparation(self.train.x[:1]).shape[1:])

    def with_tests(self, count: int) -> "Dataset":
        """The same with the first `count` test examples alone."""
        test = Examples(self.test.x[:count], self.test.y[:count])
        return replace(self, test=test, groups=self.groups and (self.groups[0], self.groups[1][:count]))

    def without_test(self, rows: Tensor) -> "Dataset":
        """The same with these training examples in place of the test set; they are no longer to be trained on."""
        left = torch.ones(len(self.train), dtype=torch.bool)
        left[rows] = False
        train, test = (Examples(self.train.x[some], self.train.y[some]) for some in (left, rows))
        return replace(
            self, train=train, test=test, groups=self.groups and (self.groups[0][left], self.groups[0][rows])
        )

    def fingerprint(self) -> str:
        """The sha256 of all examples and labels, with their shapes and kinds."""
        digest = hashlib.sha256()
        for tensor in (self.train.x, self.train.y, self.test.x, self.test.y):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


def _check_labels(what: str, examples: Examples, classes: int) -> None:
    y = examples.y
    if y.dtype != torch.int64:
        raise DataBroken(f"{what} has labels of type {y.dtype}", "Labels are torch.int64.")
    if len(y) == 0:
        raise DataBroken(f"{what} is empty", "A data set needs examples to train on and examples to test on.")
    if y.dim() != 1 and y.shape != examples.x.shape:
        shapes = f"{tuple(y.shape)} for inputs of shape {tuple(examples.x.shape)}"
        raise DataBroken(f"{what} has labels of shape {shapes}", "Give one label per example, or one per token.")
    lowest, highest = int(y.min()), int(y.max())
    if lowest < 0 or highest >= classes:
        raise DataBroken(
            f"{what} has labels from {lowest} to {highest}",
            f"With {classes} classes labels run from 0 to {classes - 1}.",
        )


def _check_tokens(what: str, x: Tensor, tokens: int) -> None:
    if x.dtype != torch.int64:
        raise DataBroken(f"{what} has tokens of type {x.dtype}", "Tokens are torch.int64.")
    lowest, highest = int(x.min()), int(x.max())
    if lowest < 0 or highest >= tokens:
        hint = f"With {tokens} tokens they run from 0 to {tokens - 1}."
        raise DataBroken(f"{what} has tokens from {lowest} to {highest}", hint)


def _check_groups(what: str, groups: Tensor, examples: int) -> None:
    if groups.dtype != torch.int64 or groups.shape != (examples,):
        shape = f"{groups.dtype} {tuple(groups.shape)}"
        raise DataBroken(f"{what} has groups {shape} for {examples} examples", "Groups are torch.int64, one each.")
