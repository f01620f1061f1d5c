"""Alignment of representations between nets of any architecture: CKA with linear or RBF kernel, and Procrustes.

A representation [..., n, d] is exchanged as features or as its kernel [..., n, n], whichever is smaller; for the linear
kernel both are equivalent. Makhija et al., ICML 2022 (FedHeNN); Kornblith et al., ICML 2019 (CKA).
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from ..tensors import Tensors

Kernel = Literal["linear", "rbf", "procrustes"]
"""`procrustes` compares the features themselves, up to rotation and scale."""

TINY = 1e-12  # keeps slopes finite where features are constant; shifts losses by less than 1e-6 for features of 0.01
MIN_TARGET_NORM = 1e-8  # a target with a smaller norm carries no information: the loss is 0


def represent(features: Tensor, kernel: Kernel, bandwidth: float = 1.0) -> dict[str, Tensor]:
    """Features in the form that is exchanged; the form is the same for all devices of one model.

    Parameters
    ----------
    features : the representation of n examples, [..., n, d].
    kernel : how representations are compared.
    bandwidth : the width of the rbf kernel, in median distances between examples.

    Returns
    -------
    "features" [..., n, d] or "kernel" [..., n, n].
    """
    kind = representation_kind(kernel, *features.shape[-2:])
    if kind == "features":
        return {kind: features}
    return {kind: _rbf(features, bandwidth) if kernel == "rbf" else features @ features.mT}


def representation_kind(kernel: Kernel, examples: int, width: int) -> Literal["features", "kernel"]:
    """The form in which a representation is exchanged: whichever is smaller.

    Parameters
    ----------
    kernel : how representations are compared.
    examples : the number n of examples.
    width : the length d of a representation.
    """
    return "features" if kernel == "procrustes" or (kernel == "linear" and width < examples) else "kernel"


def average_kernels(
    representations: Sequence[Tensors], shares: Sequence[float], kernel: Kernel, even: bool = False
) -> dict[str, Tensor]:
    """The weighted mean of kernels, in the smaller form.

    Parameters
    ----------
    representations : the representation of each device.
    shares : the weight of each.
    kernel : how representations are compared.
    even : whether to normalize each kernel first.
    """
    scales = [1 / (_norm(_center_kernel(_kernel_of(one))) + TINY) if even else 1.0 for one in representations]
    weights = [share / sum(shares) * scale for share, scale in zip(shares, scales, strict=True)]
    if all("features" in one for one in representations):
        examples = len(representations[0]["features"])
        width = sum(one["features"].shape[1] for one in representations)
        if representation_kind(kernel, examples, width) == "features":
            scaled = [one["features"] * weight**0.5 for one, weight in zip(representations, weights, strict=True)]
            return {"features": torch.cat(scaled, 1)}
    dtype = next(iter(representations[0].values())).dtype
    total = sum(_kernel_of(one).double() * weight for one, weight in zip(representations, weights, strict=True))
    return {"kernel": torch.as_tensor(total).to(dtype)}


def alignment_loss(target: Tensors, kernel: Kernel, bandwidth: float = 1.0) -> Callable[[Tensor], Tensor]:
    """A loss from 0 (equal up to rotation and scale) to 1.

    Parameters
    ----------
    target : the representation to align with, which gets no gradient.
    kernel : how representations are compared.
    bandwidth : the width of the rbf kernel, in median distances between examples.

    Returns
    -------
    A function from features [..., n, d] to the loss [...].
    """
    fixed = {name: tensor.detach() for name, tensor in target.items()}
    if kernel == "procrustes":
        return _procrustes_loss(_center(fixed["features"]))
    if kernel == "linear" and "features" in fixed:
        return _feature_loss(_center(fixed["features"]))
    return _kernel_loss(_center_kernel(_kernel_of(fixed)), kernel, bandwidth)


def select_examples(representation: Tensors, rows: Tensor) -> dict[str, Tensor]:
    """The part of a representation that belongs to some of the examples.

    Parameters
    ----------
    representation : features or kernel, [K, ...].
    rows : the numbers of the examples.
    """
    selected = {name: tensor[:, rows] for name, tensor in representation.items()}
    return {name: tensor[:, :, rows] if name == "kernel" else tensor for name, tensor in selected.items()}


def _feature_loss(target: Tensor) -> Callable[[Tensor], Tensor]:
    target_norm = _gram_norm(target)

    def loss(features: Tensor) -> Tensor:
        centered = _center(features)
        return _one_minus((centered.mT @ target).square().sum((-2, -1)), _gram_norm(centered), target_norm)

    return loss


def _kernel_loss(target: Tensor, kernel: Kernel, bandwidth: float) -> Callable[[Tensor], Tensor]:
    target_norm = _norm(target)

    def loss(features: Tensor) -> Tensor:
        if kernel == "rbf":
            own = _center_kernel(_rbf(features, bandwidth))
            return _one_minus((own * target).sum((-2, -1)), _norm(own), target_norm)
        centered = _center(features)
        return _one_minus((centered * (target @ centered)).sum((-2, -1)), _gram_norm(centered), target_norm)

    return loss


def _procrustes_loss(target: Tensor) -> Callable[[Tensor], Tensor]:
    target_norm = _norm(target)

    def loss(features: Tensor) -> Tensor:
        centered = _center(features)
        return _one_minus(_nuclear_norm(centered.mT @ target), _norm(centered), target_norm)

    return loss


def _one_minus(product: Tensor, norm: Tensor, target_norm: Tensor) -> Tensor:
    loss = 1 - product / ((norm.square() + TINY).sqrt() * target_norm)  # independent of the target's scale
    return torch.where(target_norm < MIN_TARGET_NORM, torch.zeros_like(loss), loss)


def _center(features: Tensor) -> Tensor:
    return features - features.mean(-2, keepdim=True)


def _center_kernel(kernel: Tensor) -> Tensor:
    rows = kernel - kernel.mean(-1, keepdim=True)
    return rows - rows.mean(-2, keepdim=True)


def _kernel_of(representation: Tensors) -> Tensor:
    if "kernel" in representation:
        return representation["kernel"]
    return representation["features"] @ representation["features"].mT


def _gram_norm(centered: Tensor) -> Tensor:
    """The norm of the linear kernel, from the smaller of X'X and XX', which have the same norm."""
    return _norm(centered.mT @ centered if centered.shape[-1] < centered.shape[-2] else centered @ centered.mT)


def _norm(matrix: Tensor) -> Tensor:
    return (matrix.square().sum((-2, -1)) + TINY**2).sqrt()  # differentiable at zero


def _nuclear_norm(matrix: Tensor) -> Tensor:
    """Zero for a matrix that is not finite: a device that diverges must not stop the others of its block."""
    finite = matrix.isfinite().flatten(-2).all(-1)[..., None, None]
    singular: Tensor = torch.linalg.svdvals(matrix.where(finite, 0))
    return singular.sum(-1)


def _rbf(features: Tensor, bandwidth: float) -> Tensor:
    """An RBF kernel whose width is `bandwidth` times the median distance between examples."""
    squares = features.square().sum(-1, keepdim=True)
    distances = (squares + squares.mT - 2 * features @ features.mT).clamp_min(0)
    n = features.shape[-2]
    if n == 1:  # it has no distance to another one
        return torch.ones_like(distances)
    pairs = distances.detach()[(..., *torch.triu_indices(n, n, 1, device=distances.device))].sqrt()
    width = bandwidth * pairs.median(-1).values[..., None, None]
    return torch.exp(-distances / (2 * width.square() + TINY))
