"""Data sets made of the bundled digits: one or two of them on a canvas, to be segmented or to be named.

They are drawn when they are read, always alike. Every image of the digits is on one canvas, and training and test
canvases have the digits of the training and the test set.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Interval

from ..seeds import CANVASES, generator
from .dataset import Dataset, Examples
from .npz import digits
from .preparation import PREPARATIONS
from .tasks import TASKS

SIDE, DIGIT = 16, 8  # pixels of a canvas and of a digit
INK = 64  # the gray value from which a pixel belongs to a digit
BACKGROUND, DIGITS = 0, 10
Kinds = Annotated[int, Interval(ge=2, le=DIGITS)]


def digits_segmentation(*, kinds: Kinds = DIGITS) -> Dataset:
    """One or two handwritten digits on a canvas, part of the package: 958 + 240 gray images of 16 x 16, segmentation.

    The classes of pixels are the background, 0, and digit + 1.

    Parameters
    ----------
    kinds : how many of the ten digits there are, from 0 on; with fewer the set is smaller and easier to learn.
    """
    train, test = _draw_canvases("train", kinds), _draw_canvases("test", kinds)
    return Dataset(
        "digits-segmentation",
        Examples(torch.from_numpy(train.images), torch.from_numpy(train.masks)),
        Examples(torch.from_numpy(test.images), torch.from_numpy(test.masks)),
        kinds + 1,
        PREPARATIONS["plain"],
        task=TASKS["segmentation"],
    )


def digits_multilabel(*, kinds: Kinds = DIGITS) -> Dataset:
    """Which digits are on a canvas, part of the package: 958 + 240 gray images of 16 x 16, multi-label with 10 labels.

    A canvas has one or two handwritten digits, which may be equal.

    Parameters
    ----------
    kinds : how many of the ten digits there are, from 0 on; with fewer the set is smaller and easier to learn.
    """
    train, test = _draw_canvases("train", kinds), _draw_canvases("test", kinds)
    return Dataset(
        "digits-multilabel",
        Examples(torch.from_numpy(train.images), torch.from_numpy(train.present)),
        Examples(torch.from_numpy(test.images), torch.from_numpy(test.present)),
        kinds,
        PREPARATIONS["plain"],
        task=TASKS["multi_label"],
    )


@dataclass(frozen=True, eq=False)
class _Canvases:
    images: npt.NDArray[np.uint8]  # [n, 1, side, side]
    masks: npt.NDArray[np.int64]  # [n, side, side]
    present: npt.NDArray[np.float32]  # [n, kinds]


def _draw_canvases(part: Literal["train", "test"], kinds: int) -> _Canvases:
    source = digits()
    examples = source.train if part == "train" else source.test
    kept = examples.y < kinds
    images, labels = examples.x[kept, 0].numpy(), examples.y[kept].numpy()
    draw = generator(0, CANVASES, part)
    order = draw.permutation(len(labels))
    count = 2 * (len(order) // 3)  # one digit and two digits in turn
    made = _Canvases(
        np.zeros((count, 1, SIDE, SIDE), np.uint8),
        np.full((count, SIDE, SIDE), BACKGROUND, np.int64),
        np.zeros((count, kinds), np.float32),
    )
    taken = 0
    for number in range(count):
        for top, left in _places(1 + number % 2, draw):
            image, label = images[order[taken]], int(labels[order[taken]])
            area = np.s_[top : top + DIGIT, left : left + DIGIT]
            made.images[number, 0][area] = image
            made.masks[number][area][image >= INK] = label + 1
            made.present[number, label] = 1
            taken += 1
    return made


def _places(count: int, draw: np.random.Generator) -> list[tuple[int, int]]:
    """The upper left corner of each digit; two are beside or above each other."""
    room = SIDE - DIGIT
    if count == 1:
        return [(int(draw.integers(room + 1)), int(draw.integers(room + 1)))]
    shifts = [int(draw.integers(room + 1)) for _ in range(count)]
    beside = bool(draw.integers(2))
    return [(shift, half * DIGIT) if beside else (half * DIGIT, shift) for half, shift in enumerate(shifts)]
