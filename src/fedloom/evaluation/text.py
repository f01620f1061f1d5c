"""Judging models that answer at every position: perplexity over all positions, and over those that were hidden."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..data import Dataset
from ..fleet import Ask, Fleet, Tier
from ..tensors import Tensors
from ..training import Schedule
from .exam import Exam
from .positions import device_sums, hidden_positions, position_metrics, row_sums
from .rows import Row


@dataclass(frozen=True)
class TextJudge:
    """`batch_size` rows make a batch, of which perplexity is the exponential of the mean loss."""

    dataset: Dataset
    exam: Exam
    batch_size: int

    def rows(
        self, name: str, models: Mapping[Tier, Tensors], fleet: Fleet, ask: Ask, round_number: int
    ) -> Iterator[Row]:
        for tier, said in self._scores(models, fleet, ask).items():
            for metric, value in self.measured(said["loss"], said["right"]).items():
                yield Row(round_number, name, tier.name, "", "global", metric, value)

    def _scores(self, models: Mapping[Tier, Tensors], fleet: Fleet, ask: Ask) -> dict[Tier, Tensors]:
        """A model that has diverged is not admitted, and so has no score."""
        labels = self.dataset.test.y
        order = {"rows": torch.arange(len(labels)), "labels": labels}
        task = replace(self.exam.score, schedule=Schedule(self.batch_size), address=("exam", "score"))
        inboxes = {fleet.examiner(tier): {"weights": weights, "order": order} for tier, weights in models.items()}
        said = {reply.device.tier: reply.sent["scores"] for reply in ask(task, inboxes)}
        silent = {"loss": torch.full(labels.shape, torch.nan), "right": torch.zeros(labels.shape, dtype=torch.bool)}
        return {tier: said.get(tier.name, silent) for tier in models}

    def measured(self, losses: Tensor, right: Tensor) -> dict[str, float]:
        hidden = self.hidden()
        rows = row_sums(losses[None], right[None], None if hidden is None else hidden[None])
        everything = torch.ones(1, len(losses), dtype=torch.bool)
        return position_metrics([device_sums(rows, everything, self.batch_size)])

    def hidden(self) -> Tensor | None:
        return hidden_positions(self.dataset.preparation, self.dataset.test.x)
