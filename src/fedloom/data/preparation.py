"""How stored examples become a model's input, as plain data.

Random augmentation is drawn beforehand, so preparation is a pure function of tensors and gives the same input on every
engine. The named preparations are those of the reproduced papers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..registry import Registry


@dataclass(frozen=True)
class Preparation:
    """Stored examples -> a model's input; in training with random crops, flips and cutouts.

    Order: scale bytes to 0..1, resize, repeat gray, crop, flip, normalize, cutout. Resizing, repeating, crops, flips
    and cutouts are for images. Integer tokens are unchanged, except for the masks of training.

    Parameters
    ----------
    mean, std : normalize with these numbers: one per channel of images and time series, one per feature of rows, or one
        for all; empty: do not normalize.
    size : resize to this height and width.
    channels : repeat gray images to this many channels.
    crop_padding : random crops of the image, padded with this many black pixels on each side; 0: no crops.
    crop_chance : the probability of a crop; else the image stays in place.
    flip : whether to mirror images with probability 1/2.
    cutout : the side of a random square of zeros; 0: none.
    pad_normalized : whether crops pad with zeros after normalization, instead of black before it.
    mask_chance : the probability that a token is masked in training.
    mask_token : the id of the mask.
    axes : the axes of one stored example: 3 for images, 2 for time series [channels, length], 1 for rows of features. A
        `Dataset` sets it to that of its examples: with leading axes for devices, a tensor alone does not tell.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    size: tuple[int, int] | None = None
    channels: int | None = None
    crop_padding: int = 0
    crop_chance: float = 1.0
    flip: bool = False
    cutout: int = 0
    pad_normalized: bool = False
    mask_chance: float = 0.0
    mask_token: int | None = None
    axes: int = 3

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or any(not spread > 0 for spread in self.std):
            raise ValueError("mean and std need one number per channel each, every std above 0")
        for name, chance in (("crop_chance", self.crop_chance), ("mask_chance", self.mask_chance)):
            if not 0 <= chance <= 1:
                raise ValueError(f"{name} must lie between 0 and 1, not {chance}")
        if self.mask_chance and self.mask_token is None:
            raise ValueError("mask_chance needs a mask_token, the id of the mask")
        if min(self.crop_padding, self.cutout) < 0:
            raise ValueError("crop_padding and cutout count pixels and cannot be negative")

    def __str__(self) -> str:
        """The steps in words, in their order."""
        chance = f", probability {self.crop_chance:g}" if self.crop_chance < 1 else ""
        crop = f"random crops (padding {self.crop_padding}{chance})" if self.crop_padding else ""
        normalize = _describe_normalization(self.mean, self.std)
        augment = (crop, "random flips" if self.flip else "")
        steps = (
            "scale bytes to 0..1",
            f"resize to {self.size[0]} x {self.size[1]}" if self.size else "",
            f"repeat gray to {self.channels} channels" if self.channels else "",
            *((normalize, *augment) if self.pad_normalized else (*augment, normalize)),
            f"random cutout of {self.cutout} x {self.cutout}" if self.cutout else "",
            f"mask tokens with probability {self.mask_chance:g}" if self.mask_chance else "",
        )
        return f"{', '.join(filter(None, steps)).capitalize()}."

    def for_shape(self, shape: tuple[int, ...], is_text: bool = False) -> "Preparation":
        """The same preparation for stored examples of this shape.

        Parameters
        ----------
        shape : the shape of one stored example.
        is_text : whether examples consist of token ids.

        Raises
        ------
        ValueError
            If one of its steps cannot be applied to such examples.
        """
        problem = self._find_problem(shape, is_text)
        if problem:
            raise ValueError(problem)
        return self if self.axes == len(shape) or is_text else replace(self, axes=len(shape))

    def _find_problem(self, shape: tuple[int, ...], is_text: bool) -> str | None:
        what = f"tokens {shape}" if is_text else f"{_KINDS.get(len(shape), 'examples')} of shape {shape}"
        steps = {
            "size": self.size, "channels": self.channels, "crop_padding": self.crop_padding, "flip": self.flip,
            "cutout": self.cutout,
        }  # fmt: skip
        for_images = [name for name, value in steps.items() if value]
        if for_images and (is_text or len(shape) != 3):
            verb = "is" if len(for_images) == 1 else "are"
            return f"{' and '.join(for_images)} of a preparation {verb} for images, and these are {what}"
        if self.mean and is_text:
            return f"mean and std of a preparation are for numbers, and these are {what}"
        if self.mask_chance and not is_text:
            return f"mask_chance of a preparation is for tokens, and these are {what}"
        is_gray = len(shape) == 3 and shape[0] == 1  # and is repeated to as many channels as there are numbers
        channels = (self.channels or len(self.mean)) if is_gray else shape[0] if shape else 1
        if len(self.mean) not in (0, 1, channels):
            part = "features" if len(shape) == 1 else "channels"
            return f"mean and std of a preparation have {len(self.mean)} numbers, and there are {channels} {part}"
        return None

    def draw_augmentation(self, generator: np.random.Generator, count: int, *shape: int) -> dict[str, Tensor]:
        """Draw the augmentation of some stored examples of one shape.

        Parameters
        ----------
        generator : the source of randomness.
        count : the number of examples.
        shape : the shape of one. The last two axes of an image are height and width; in text every token gets its own
            draw.

        Returns
        -------
        Name -> [count, k]; {} if there is no augmentation.
        """
        height, width = self.size or (shape[-2:] if len(shape) > 1 else (1, 1))
        augmentation: dict[str, Tensor] = {}
        if self.crop_padding:
            offsets = generator.integers(0, 2 * self.crop_padding + 1, (count, 2))
            is_moved = generator.random((count, 1)) < self.crop_chance
            augmentation["crop"] = torch.from_numpy(np.where(is_moved, offsets, self.crop_padding))
        if self.flip:
            augmentation["flip"] = torch.from_numpy(generator.random((count, 1)) < 0.5)
        if self.cutout:
            augmentation["cutout"] = torch.from_numpy(generator.integers(0, (height, width), (count, 2)))
        if self.mask_chance:
            augmentation["mask"] = torch.from_numpy(generator.random((count, *shape)) < self.mask_chance)
        return augmentation

    def __call__(
        self, x: Tensor, augmentation: Mapping[str, Tensor] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Prepare examples; without `augmentation` nothing is random.

        Parameters
        ----------
        x : images [..., channels, height, width], time series [..., channels, length], rows [..., features] or tokens
            [..., length].
        augmentation : what `draw_augmentation` drew, [..., k] with the leading axes of x.
        dtype : the type of the result; None: torch's default.
        """
        if x.dtype != torch.uint8 and not x.is_floating_point():
            return self._mask(x, augmentation or {})
        values = x.to(dtype or torch.get_default_dtype())
        if x.dtype == torch.uint8:
            values = values / 255
        if not (self.mean or self.size or self.channels or augmentation):
            return values
        if x.dim() < self.axes:
            raise ValueError(f"an example has {self.axes} axes here, but x has {x.dim()}; see Preparation.for_shape")
        if self.axes != 3:
            return self._normalize(values)
        leading = x.shape[:-3]
        count = math.prod(leading)
        flat = {name: numbers.reshape(count, -1) for name, numbers in (augmentation or {}).items()}
        images = self._prepare(values.reshape(count, *x.shape[-3:]), flat)
        return images.reshape(*leading, *images.shape[1:])

    def _mask(self, tokens: Tensor, augmentation: Mapping[str, Tensor]) -> Tensor:
        if "mask" not in augmentation or self.mask_token is None:
            return tokens
        return tokens.masked_fill(augmentation["mask"].to(tokens.device), self.mask_token)

    def _prepare(self, images: Tensor, augmentation: Mapping[str, Tensor]) -> Tensor:
        if self.size and tuple(images.shape[-2:]) != self.size:
            images = F.interpolate(images, self.size, mode="bilinear", align_corners=False, antialias=True)
        if self.channels and images.shape[1] == 1:
            images = images.expand(-1, self.channels, -1, -1)
        if self.pad_normalized:
            images = self._crop_and_flip(self._normalize(images), augmentation)
        else:
            images = self._normalize(self._crop_and_flip(images, augmentation))
        return _cutout(images, augmentation["cutout"], self.cutout) if "cutout" in augmentation else images

    def _normalize(self, images: Tensor) -> Tensor:
        if not self.mean:
            return images
        mean, std = (_per_channel(numbers, self.axes, images.dtype, images.device) for numbers in (self.mean, self.std))
        return (images - mean) / std

    def _crop_and_flip(self, images: Tensor, augmentation: Mapping[str, Tensor]) -> Tensor:
        if "crop" not in augmentation and "flip" not in augmentation:
            return images
        count, padding = len(images), self.crop_padding if "crop" in augmentation else 0
        crop = augmentation.get("crop", torch.zeros(count, 2, dtype=torch.int64, device=images.device))
        flip = augmentation.get("flip", torch.zeros(count, 1, dtype=torch.bool, device=images.device))
        return crop_and_flip(images, crop.to(images.device), flip.to(images.device), padding)


@lru_cache(maxsize=256)
def _per_channel(numbers: tuple[float, ...], axes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One number per channel; cached, so that an accelerator receives them once."""
    with torch.inference_mode(False):  # they may be used in training later
        return torch.tensor(numbers, dtype=dtype, device=device).view(-1, *[1] * (axes - 1))


_KINDS = {1: "rows", 2: "time series", 3: "images"}
_LISTED = 4  # of more numbers, only the count is shown


def _describe_normalization(mean: tuple[float, ...], std: tuple[float, ...]) -> str:
    if len(mean) > _LISTED:
        return f"normalize by {len(mean)} means and stds"
    return f"normalize by mean {_listed(mean)} and std {_listed(std)}" if mean else ""


def _listed(numbers: tuple[float, ...]) -> str:
    return "/".join(f"{number:g}" for number in numbers)


def crop_and_flip(images: Tensor, crop: Tensor, flip: Tensor, padding: int) -> Tensor:
    """Crop every padded image at its offset [count, 2], then mirror it where `flip` [count, 1]."""
    height, width = images.shape[-2:]
    columns = torch.arange(width, device=images.device)
    columns = torch.where(flip, width - 1 - columns, columns) + crop[:, 1:]
    rows = torch.arange(height, device=images.device) + crop[:, :1]
    padded = F.pad(images, [padding] * 4)
    positions = (rows[:, :, None] * padded.shape[-1] + columns[:, None, :]).flatten(1)
    cropped = padded.flatten(2).gather(2, positions[:, None].expand(-1, images.shape[1], -1))
    return cropped.view(images.shape)


def _cutout(images: Tensor, center: Tensor, length: int) -> Tensor:
    """A square of zeros around each center [count, 2], clipped at the image's edge (DeVries & Taylor, 2017)."""
    height, width = images.shape[-2:]
    center, half = center.to(images.device), length // 2
    rows = torch.arange(height, device=images.device) - center[:, :1]
    columns = torch.arange(width, device=images.device) - center[:, 1:]
    in_rows, in_columns = ((-half <= steps) & (steps < half) for steps in (rows, columns))
    return images.masked_fill((in_rows[:, :, None] & in_columns[:, None, :])[:, None], 0)


_NO_PREPARATION = Preparation()

PREPARATIONS: Registry[Preparation] = Registry(
    "preparations",
    {
        "plain": _NO_PREPARATION,
        "crop_flip": Preparation(crop_padding=4, flip=True),
        "heterofl_mnist": Preparation((0.1307,), (0.3081,)),
        "fashion": Preparation((0.2860,), (0.3530,)),
        "pfllib_fashion": Preparation((0.5,), (0.5,)),
        "fedsup_fashion": Preparation((0.2860,), (0.3530,), size=(32, 32), channels=3, crop_padding=4, flip=True),
        "fedin_fashion": Preparation(size=(32, 32)),
        "heterofl_cifar10": Preparation((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), crop_padding=4, flip=True),
        "imagenet_cifar": Preparation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), crop_padding=4, flip=True),
        "fedml_cifar10": Preparation(
            (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), crop_padding=4, flip=True, cutout=16
        ),
        "feddyn_cifar10": Preparation(
            (0.491, 0.482, 0.447),
            (0.247, 0.243, 0.262),
            crop_padding=4,
            crop_chance=0.5,
            flip=True,
            pad_normalized=True,
        ),
        "cifar100": Preparation((0.507, 0.487, 0.441), (0.267, 0.256, 0.276), crop_padding=4, flip=True),
        "feddyn_cifar100": Preparation(
            (0.5071, 0.4867, 0.4408),
            (0.2675, 0.2565, 0.2761),
            crop_padding=4,
            crop_chance=0.5,
            flip=True,
            pad_normalized=True,
        ),
        "fedsup_pathmnist": Preparation((0.5,) * 3, (0.5,) * 3, size=(32, 32), crop_padding=4, flip=True),
    },
)
