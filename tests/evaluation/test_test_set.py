"""Evaluation on the test set takes the memory of one batch, however many there are."""

import multiprocessing
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.data import Preparation
from fedloom.engines import keep_freed_memory
from fedloom.evaluation.test_set import GlobalEvaluation
from fedloom.models import build_model

BATCH, WIDE = 64, 40_000
FEW, MANY = 10, 60
ACTIVATIONS = BATCH * WIDE * 4 / 1e6  # megabytes


class Asked:
    """The part of a client that the evaluation uses."""

    preparation = Preparation()

    def __init__(self, net: Any, x: Tensor, y: Tensor):
        self.model, self.tests = net, self
        self.x, self.y = x, y


def grown(task: str, link: Any) -> None:
    """Megabytes that many batches take beyond what a few have taken before them."""
    torch.set_num_threads(1)
    keep_freed_memory()
    net = build_model("wide", lambda: nn.Sequential(nn.Linear(8, WIDE), nn.ReLU(), nn.Linear(WIDE, 4)), {}, (8,), 4)
    weights = {name: one.unsqueeze(0) for name, one in net.initial_weights(0).items()}
    after = []
    for batches in (FEW, MANY):
        rows = torch.arange(BATCH * batches)
        x, y = torch.randn(len(rows), 8), rows % 4
        order = {"rows": rows.unsqueeze(0), "labels": y.unsqueeze(0)}
        inbox = {"weights": weights, "order": order, "batches": {"lengths": torch.full((1, batches), BATCH)}}
        getattr(GlobalEvaluation(BATCH), task).run(Asked(net, x, y), inbox)
        after.append(held())
    link.send(after[1] - after[0])


def held() -> float:
    match = re.search(r"VmRSS:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024 / 1e6


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="memory is read from /proc")
@pytest.mark.parametrize("task", ["predict", "score"])
def test_global_evaluation_memory_does_not_grow_with_batches(task: str) -> None:
    near, far = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=grown, args=(task, far))
    process.start()
    process.join(60)
    assert near.poll()  # the process has not failed
    assert near.recv() < 6 * ACTIVATIONS  # a heap takes a few batches to settle, and here gets fifty more
