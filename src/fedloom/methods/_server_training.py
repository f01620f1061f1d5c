"""Training on the server, as in FedGKT, FedGH and FedTGP: it is a client whose examples devices have uploaded."""

import torch

from ..client import Client, Optimizer, PaddedIndices, Schedule, draw_plan, merge_plans
from ..data import Examples, Preparation
from ..models import Model
from ..placement import enter
from ..seeds import SERVER_BATCHES, generator


def server_client(
    model: Model, optimizer: Optimizer, examples: Examples, schedule: Schedule, seed: int, classes: int
) -> Client:
    """The server as a client, in a block of one, that holds all these examples, whose labels are below `classes`."""
    rows = torch.arange(len(examples))
    plan = draw_plan(rows, schedule, examples, Preparation(), generator(seed, SERVER_BATCHES))
    train_indices = PaddedIndices(rows.unsqueeze(0), torch.ones(1, len(rows), dtype=torch.bool))
    no_test = PaddedIndices(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, 0, dtype=torch.bool))
    steps, train_indices, no_test = enter((merge_plans([plan]), train_indices, no_test), examples.y.device)
    seen = torch.zeros(1, classes, dtype=torch.bool, device=examples.y.device)
    seen.index_fill_(1, examples.y.flatten(), True)
    return Client(
        model, optimizer, examples, examples, no_test, Preparation(), steps, seen, {}, train_indices=train_indices
    )  # fmt: skip
