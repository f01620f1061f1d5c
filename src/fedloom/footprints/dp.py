"""A mean that gives no device away: every update has at most one length, and noise hides any update of that length."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..seeds import DP_NOISE, generator
from ..tensors import Tensors
from .coverage import ClientUpdate
from .footprint import Footprint, carve, grid

ExpectedParticipation = Sequence[tuple[Footprint, float]]
"""Where devices of each tier vote, and how many of them are expected to in a round."""


class NotCovered(ValueError):  # noqa: N818 - named for what is wrong
    """A vote that noise on this merge would not hide."""


@dataclass(frozen=True)
class DPAggregator:
    """A `Aggregate`, good for one round. A device's whole update, wherever it lies, is shortened to `clip`. So the sums,
    all entries of all rings taken as one vector, change by at most `clip` if one device comes or stays away, and noise
    of `noise` times that on each hides which: one Gaussian mechanism. Then every sum is divided by the number of votes
    expected on its ring, which is known before anybody answers; the number that came would tell who was there.

    Where nobody is expected, entries stay bit for bit. Where somebody is, they get noise even if nobody came."""

    clip: float
    noise: float
    electorate: ExpectedParticipation
    seed: int
    round_number: int
    _used: list[None] = field(default_factory=list, repr=False, compare=False)

    def __call__(self, whole: Tensors, contributions: Iterable[ClientUpdate]) -> dict[str, Tensor]:
        if self._used:
            raise NotCovered("a method merges twice in a round, and the privacy of only one merge is counted")
        self._used.append(None)
        said = [(one, self._factor(whole, one)) for one in contributions]
        return {name: self._released(name, old, said) for name, old in whole.items()}

    def _factor(self, whole: Tensors, one: ClientUpdate) -> float:
        """What an update is multiplied by to be no longer than allowed; one that is no number is not heard."""
        if one.weight != 1:
            raise NotCovered(f"a device votes with weight {one.weight:g}, and noise hides only votes of weight 1")
        squares = [float(_update(whole[name], one, name).square().sum()) for name in one.footprint.blocks]
        length = math.sqrt(sum(squares))
        if math.isnan(length):
            return 0.0
        return min(1.0, self.clip / length) if length else 1.0

    def _released(self, name: str, old: Tensor, said: Sequence[tuple[ClientUpdate, float]]) -> Tensor:
        votes, total = expected_votes(name, old, self.electorate), torch.zeros_like(old, dtype=torch.float64)
        for one, factor in said:
            if name not in one.footprint.blocks:
                continue
            where = grid(old, one.footprint.blocks[name])
            if bool((votes[where] <= 0).any()):
                raise NotCovered(f"a device votes on entries of {name} where no vote is expected")
            if factor:
                total[where] += _update(old, one, name) * factor
        heard = votes > 0
        if not bool(heard.any()):
            return old
        if self.noise:
            drawn = generator(self.seed, DP_NOISE, self.round_number, name).standard_normal(tuple(old.shape))
            total += self.noise * self.clip * torch.as_tensor(drawn, dtype=torch.float64).to(old.device)
        made = old.double() + total / votes.masked_fill(~heard, 1)
        return torch.where(heard, made.to(old.dtype), old)


def expected_votes(name: str, whole: Tensor, electorate: ExpectedParticipation) -> Tensor:
    """For every entry of a tensor how many devices are expected to vote on it."""
    votes = torch.zeros_like(whole, dtype=torch.float64)
    for footprint, expected in electorate:
        if name in footprint.blocks:
            votes[grid(whole, footprint.blocks[name])] += expected
    return votes


def _update(old: Tensor, one: ClientUpdate, name: str) -> Tensor:
    return one.tensors[name].double() - carve(old, one.footprint.blocks[name]).double()
