"""Metrics of how well scores rank positive examples before negative ones."""

import math

from torch import Tensor


def area_under_roc(scores: Tensor, positive: Tensor) -> float:
    """The probability that a positive example scores higher than a negative one; ties count half."""
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        return math.nan
    _, groups, sizes = scores.unique(return_inverse=True, return_counts=True)
    ranks = sizes.cumsum(0).double() - (sizes.double() - 1) / 2  # mean rank of equal scores, from 1
    above = float(ranks[groups][positive].sum()) - positives * (positives + 1) / 2
    return above / (positives * negatives)


def average_precision(scores: Tensor, positive: Tensor) -> float:
    """Precision at every score of a positive example, the mean over them; NaN without one. Equal scores count alike."""
    positives = int(positive.sum())
    if not positives:
        return math.nan
    _, groups, sizes = scores.unique(return_inverse=True, return_counts=True)  # ascending
    hits = positive.double().new_zeros(len(sizes), dtype=sizes.double().dtype).index_add_(0, groups, positive.double())
    retrieved = sizes.double().flip(0).cumsum(0)
    precision = hits.flip(0).cumsum(0) / retrieved
    return float((precision * hits.flip(0)).sum()) / positives


def mean_of_known(values: list[float]) -> float:
    """The mean of the values that are not NaN, in percent; NaN if there are none."""
    known = [value for value in values if not math.isnan(value)]
    return 100 * math.fsum(known) / len(known) if known else math.nan
