"""How many examples of each label a device has, counted by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedloom.client import Client, PaddedIndices, Step
from fedloom.data import IGNORED, Examples
from fedloom.models import StepSeeds
from fedloom.testing import tiny_model

ROWS = PaddedIndices(  # of the second device two rows are padding, of the third all
    torch.tensor([[0, 1, 2, 4], [3, 2, 0, 0], [0, 0, 0, 0]]),
    torch.tensor([[True] * 4, [True, True, False, False], [False] * 4]),
)


def client(y: torch.Tensor, client_for: Callable[..., Client], **changes: Any) -> Client:
    step = Step(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3), {}, StepSeeds((0, 0, 0)))
    return client_for(tiny_model("mlp"), Examples(torch.zeros(5, 1, 6, 6), y), [step], train_indices=ROWS, **changes)


@pytest.mark.parametrize(
    ("y", "expected"),
    [
        ([0, 2, 2, 3, 0], [[2, 0, 2, 0], [0, 0, 1, 1], [0, 0, 0, 0]]),
        (
            [[0, 1], [2, IGNORED], [2, 2], [3, IGNORED], [IGNORED, IGNORED]],
            [[1, 1, 3, 0], [0, 0, 2, 1], [0, 0, 0, 0]],
        ),
    ],
    ids=["examples", "tokens"],
)
def test_label_counts_leave_out_padding_and_ignored_tokens(
    y: list[Any], expected: list[list[int]], client_for: Callable[..., Client]
) -> None:
    """Also of labels that a device is said to have none of."""
    for seen in (True, False):
        block = client(torch.tensor(y), client_for, seen_labels=torch.full((3, 4), seen))
        found = block.label_counts()
        assert found.dtype == torch.get_default_dtype()
        assert found.tolist() == expected
    assert block.examples.y.tolist() == y
