"""How alike two nets see the same examples, whatever their architectures: centered kernel alignment and its relatives.

A representation [..., n, d] is told either as it is or as its kernel [..., n, n], whichever is smaller; where the
kernel is linear both say the same. Makhija et al., ICML 2022; Kornblith et al., ICML 2019.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from ..tensors import Tensors

Kernel = Literal["linear", "rbf", "procrustes"]
"""`procrustes` compares representations themselves, up to rotation and scale."""

TINY = 1e-12
NOTHING = 1e-8  # a target of a smaller norm says nothing, and pulls nowhere


def described(features: Tensor, kernel: Kernel, bandwidth: float = 1.0) -> dict[str, Tensor]:
    """What is told of a representation; the same for every device of one model."""
    name = description(kernel, *features.shape[-2:])
    if name == "features":
        return {name: features}
    return {name: _rbf(features, bandwidth) if kernel == "rbf" else features @ features.mT}


def description(kernel: Kernel, examples: int, width: int) -> Literal["features", "kernel"]:
    return "features" if kernel == "procrustes" or (kernel == "linear" and width < examples) else "kernel"


def blended(told: Sequence[Tensors], shares: Sequence[float], kernel: Kernel, even: bool = False) -> dict[str, Tensor]:
    """The weighted mean of kernels, told in the smallest way. `even`: each is first made equally loud."""
    loud = [1 / (_norm(_centred_kernel(_kernel(one))) + TINY) if even else 1.0 for one in told]
    weights = [share / sum(shares) * scale for share, scale in zip(shares, loud, strict=True)]
    if all("features" in one for one in told):
        examples = len(told[0]["features"])
        width = sum(one["features"].shape[1] for one in told)
        if description(kernel, examples, width) == "features":
            per_device = [one["features"] * weight**0.5 for one, weight in zip(told, weights, strict=True)]
            return {"features": torch.cat(per_device, 1)}
    dtype = next(iter(told[0].values())).dtype
    total = sum(_kernel(one).double() * weight for one, weight in zip(told, weights, strict=True))
    return {"kernel": torch.as_tensor(total).to(dtype)}


def misalignment(target: Tensors, kernel: Kernel, bandwidth: float = 1.0) -> Callable[[Tensor], Tensor]:
    """[..., n, d] -> [...], from 0, the same but for rotation and scale, to 1. The target learns nothing from it."""
    still = {name: tensor.detach() for name, tensor in target.items()}
    if kernel == "procrustes":
        return _procrustes(_centred(still["features"]))
    if kernel == "linear" and "features" in still:
        return _from_features(_centred(still["features"]))
    return _from_kernel(_centred_kernel(_kernel(still)), kernel, bandwidth)


def about(told: Tensors, rows: Tensor) -> dict[str, Tensor]:
    """The part of what is told, [K, ...], that is about some of the examples."""
    some = {name: tensor[:, rows] for name, tensor in told.items()}
    return {name: tensor[:, :, rows] if name == "kernel" else tensor for name, tensor in some.items()}


def _from_features(target: Tensor) -> Callable[[Tensor], Tensor]:
    size = _gram_norm(target)

    def distance(features: Tensor) -> Tensor:
        own = _centred(features)
        return _one_less((own.mT @ target).square().sum((-2, -1)), _gram_norm(own), size)

    return distance


def _from_kernel(target: Tensor, kernel: Kernel, bandwidth: float) -> Callable[[Tensor], Tensor]:
    size = _norm(target)

    def distance(features: Tensor) -> Tensor:
        if kernel == "rbf":
            own = _centred_kernel(_rbf(features, bandwidth))
            return _one_less((own * target).sum((-2, -1)), _norm(own), size)
        centered = _centred(features)
        return _one_less((centered * (target @ centered)).sum((-2, -1)), _gram_norm(centered), size)

    return distance


def _procrustes(target: Tensor) -> Callable[[Tensor], Tensor]:
    size = _norm(target)

    def distance(features: Tensor) -> Tensor:
        own = _centred(features)
        return _one_less(_nuclear_norm(own.mT @ target), _norm(own), size)

    return distance


def _one_less(together: Tensor, own: Tensor, target: Tensor) -> Tensor:
    distance = 1 - together / ((own.square() + TINY).sqrt() * target)  # how small a target is does not matter
    return torch.where(target < NOTHING, torch.zeros_like(distance), distance)


def _centred(features: Tensor) -> Tensor:
    return features - features.mean(-2, keepdim=True)


def _centred_kernel(kernel: Tensor) -> Tensor:
    rows = kernel - kernel.mean(-1, keepdim=True)
    return rows - rows.mean(-2, keepdim=True)


def _kernel(told: Tensors) -> Tensor:
    return told["kernel"] if "kernel" in told else told["features"] @ told["features"].mT


def _gram_norm(centered: Tensor) -> Tensor:
    """Of the kernel, by the smaller of the two matrices that have its norm."""
    return _norm(centered.mT @ centered if centered.shape[-1] < centered.shape[-2] else centered @ centered.mT)


def _norm(matrix: Tensor) -> Tensor:
    return (matrix.square().sum((-2, -1)) + TINY**2).sqrt()  # no gradient of a root at zero


def _nuclear_norm(matrix: Tensor) -> Tensor:
    """Zero where numbers have left their range: one device that diverges must not stop the others of its block."""
    finite = matrix.isfinite().flatten(-2).all(-1)[..., None, None]
    singular: Tensor = torch.linalg.svdvals(matrix.where(finite, 0))
    return singular.sum(-1)


def _rbf(features: Tensor, bandwidth: float) -> Tensor:
    """Its width is `bandwidth` times the median distance between examples, each net's own."""
    squares = features.square().sum(-1, keepdim=True)
    apart = (squares + squares.mT - 2 * features @ features.mT).clamp_min(0)
    n = features.shape[-2]
    pairs = apart.detach()[(..., *torch.triu_indices(n, n, 1))].sqrt()
    width = bandwidth * pairs.median(-1).values[..., None, None]
    return torch.exp(-apart / (2 * width.square() + TINY))
