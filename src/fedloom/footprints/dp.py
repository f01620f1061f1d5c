"""Aggregation with user-level differential privacy: clipped updates, Gaussian noise, fixed denominators.

McMahan et al., ICLR 2018 (DP-FedAvg), for updates that cover different parts of the global model.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..seeds import DP_NOISE, generator
from ..tensors import Tensors
from .coverage import ClientUpdate, Participation, count_contributors
from .footprint import block_index, take_block

ExpectedParticipation = Participation
"""For each tier, its footprint and the expected number of its devices in a round."""


class UnprotectedUpdate(ValueError):  # noqa: N818 - named for what is wrong
    """An update that this mechanism's noise would not hide."""


@dataclass(frozen=True)
class DPAggregator:
    """An `Aggregate` with user-level differential privacy, for a single use in one round.

    Each update is clipped to an L2 norm of `clip` over all it covers. One device therefore changes the vector of all
    sums by at most `clip`, and noise of standard deviation `noise * clip` on each entry is one Gaussian mechanism. Each
    sum is divided by the number of contributors expected there, since the actual number would reveal who took part.

    Entries without expected contributors stay bit for bit. All others get noise even if no device replied.

    Parameters
    ----------
    clip : the largest L2 norm of an update.
    noise : the noise multiplier.
    expected_participation : for each tier, its footprint and the expected number of its devices in a round.
    seed : the seed of the run.
    round_number : the round.
    """

    clip: float
    noise: float
    expected_participation: ExpectedParticipation
    seed: int
    round_number: int
    _used: list[None] = field(default_factory=list, repr=False, compare=False)

    def __call__(self, weights: Tensors, updates: Iterable[ClientUpdate]) -> dict[str, Tensor]:
        if self._used:
            raise UnprotectedUpdate("the method aggregates twice in a round, but the privacy budget covers only one")
        self._used.append(None)
        scaled = [(update, self._clip_factor(weights, update)) for update in updates]
        return {name: self._release(name, old, scaled) for name, old in weights.items()}

    def updated_entries(self, weights: Tensors, updates: Sequence[ClientUpdate]) -> dict[str, Tensor]:
        """All entries with expected contributors, since they get noise even if no device replied.

        Parameters
        ----------
        weights : the global weights.
        updates : what devices returned.
        """
        return {name: count_contributors(name, old, self.expected_participation) > 0 for name, old in weights.items()}

    def _clip_factor(self, weights: Tensors, update: ClientUpdate) -> float:
        """The factor that clips an update; 0 for an update that is not finite."""
        if update.weight != 1:
            raise UnprotectedUpdate(f"an update has weight {update.weight:g}, but noise hides only updates of weight 1")
        squares = [float(_difference(weights[name], update, name).square().sum()) for name in update.footprint.blocks]
        norm = math.sqrt(sum(squares))
        if math.isnan(norm):
            return 0.0
        return min(1.0, self.clip / norm) if norm else 1.0

    def _release(self, name: str, old: Tensor, scaled: Sequence[tuple[ClientUpdate, float]]) -> Tensor:
        counts = count_contributors(name, old, self.expected_participation)
        total = torch.zeros_like(old, dtype=torch.float64)
        for update, factor in scaled:
            if name not in update.footprint.blocks:
                continue
            index = block_index(old, update.footprint.blocks[name])
            if bool((counts[index] <= 0).any()):
                raise UnprotectedUpdate(f"an update covers entries of {name} where no contributors are expected")
            if factor:
                total[index] += _difference(old, update, name) * factor
        expected = counts > 0
        if not bool(expected.any()):
            return old
        if self.noise:
            drawn = generator(self.seed, DP_NOISE, self.round_number, name).standard_normal(tuple(old.shape))
            total += self.noise * self.clip * torch.as_tensor(drawn, dtype=torch.float64).to(old.device)
        new = old.double() + total / counts.masked_fill(~expected, 1)
        return torch.where(expected, new.to(old.dtype), old)


def _difference(old: Tensor, update: ClientUpdate, name: str) -> Tensor:
    return update.tensors[name].double() - take_block(old, update.footprint.blocks[name]).double()
