"""What a data set is: two bundles of examples, how many labels there are, and how a model gets to see them.

Examples stay as they are stored (images as bytes), so a data set takes a quarter of the memory of its floats.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from .preparation import Preparation


class DataMissing(Exception):  # noqa: N818 - named for what is wrong
    """A data set, or a file of it, is not there; `hint` says what to put where."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}"


class DataBroken(Exception):  # noqa: N818 - named for what is wrong
    """A file is there but is not what it should be; `hint` says how to mend it."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}"


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs and their labels, the same number of each; images are uint8 [n, channels, height, width]."""

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise DataBroken(f"{len(self.x)} inputs but {len(self.y)} labels", "Give every example one label.")

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a test set with labels 0 .. classes - 1."""

    name: str
    train: Examples
    test: Examples
    classes: int
    preparation: Preparation

    def __post_init__(self) -> None:
        for part, examples in (("training", self.train), ("test", self.test)):
            _check_labels(f"the {part} set of {self.name}", examples.y, self.classes)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one prepared example, e.g. (1, 28, 28)."""
        return tuple(self.preparation(self.train.x[:1]).shape[1:])

    def fingerprint(self) -> str:
        """The sha256 of all examples and labels, with their shapes and kinds."""
        digest = hashlib.sha256()
        for tensor in (self.train.x, self.train.y, self.test.x, self.test.y):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


def _check_labels(what: str, y: Tensor, classes: int) -> None:
    if y.dtype != torch.int64:
        raise DataBroken(f"{what} has labels of type {y.dtype}", "Labels are torch.int64.")
    if len(y) == 0:
        raise DataBroken(f"{what} is empty", "A data set needs examples to train on and examples to test on.")
    lowest, highest = int(y.min()), int(y.max())
    if lowest < 0 or highest >= classes:
        raise DataBroken(
            f"{what} has labels from {lowest} to {highest}",
            f"With {classes} classes labels run from 0 to {classes - 1}.",
        )
