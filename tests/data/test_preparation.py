"""Preparation against a slow reference that treats one image at a time, as the papers' pipelines do."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.data import PREPARATIONS, Preparation
from fedloom.seeds import generator


def bilinear(image, size):
    """Plain bilinear upsampling with pixel centers at halves, for one [c, h, w] image."""

    def weights(new, old):
        index = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
        low = np.floor(index).astype(int)
        high = np.minimum(low + 1, old - 1)
        matrix = np.zeros((new, old))
        np.add.at(matrix, (np.arange(new), low), 1 - (index - low))
        np.add.at(matrix, (np.arange(new), high), index - low)
        return matrix

    return np.einsum("yh,chw,xw->cyx", weights(size[0], image.shape[1]), image, weights(size[1], image.shape[2]))


def crop_and_flip(preparation, image, augmentation):
    if "crop" in augmentation:
        border = preparation.crop_padding
        padded = np.pad(image, ((0, 0), (border, border), (border, border)))
        top, left = augmentation["crop"]
        image = padded[:, top : top + image.shape[1], left : left + image.shape[2]]
    if "flip" in augmentation and augmentation["flip"][0]:
        image = image[:, :, ::-1]
    return image


def normalize(preparation, image):
    if not preparation.mean:
        return image
    mean, std = np.array(preparation.mean), np.array(preparation.std)
    return (image - mean[:, None, None]) / std[:, None, None]


def reference(preparation, image, augmentation):
    image = image.numpy().astype(np.float64) / 255
    if preparation.size:
        image = bilinear(image, preparation.size)
    if preparation.channels:
        image = np.repeat(image, preparation.channels, axis=0)
    if preparation.pad_normalized:
        image = crop_and_flip(preparation, normalize(preparation, image), augmentation)
    else:
        image = normalize(preparation, crop_and_flip(preparation, image, augmentation))
    if "cutout" in augmentation:
        image, half = image.copy(), preparation.cutout // 2
        row, column = augmentation["cutout"]
        image[:, max(row - half, 0) : row + half, max(column - half, 0) : column + half] = 0
    return image


def images_for(preparation, count, seed=0):
    channels = 3 if len(preparation.mean) == 3 else 1
    return torch.from_numpy(generator(seed, "images").integers(0, 256, (count, channels, 20, 24), dtype=np.uint8))


@pytest.mark.parametrize("name", PREPARATIONS)
def test_preparation_every_named_one_matches_reference(name):
    preparation = PREPARATIONS[name]
    x = images_for(preparation, 24)
    augmentation = preparation.draw_augmentation(generator(1, "augmentation"), 24, 20, 24)
    for given_draws in ({}, augmentation):
        prepared = preparation(x, given_draws, torch.float64)
        for index in range(24):
            own = {key: numbers[index].numpy() for key, numbers in given_draws.items()}
            np.testing.assert_allclose(prepared[index].numpy(), reference(preparation, x[index], own), atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(
    padding=st.integers(0, 5),
    chance=st.floats(0, 1),
    flip=st.booleans(),
    cutout=st.integers(0, 9),
    normalized=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_preparation_any_augmentation_matches_reference(padding, chance, flip, cutout, normalized, seed):
    preparation = Preparation((0.4,), (0.2,), None, None, padding, chance, flip, cutout, pad_normalized=normalized)
    x = images_for(preparation, 4, seed)
    augmentation = preparation.draw_augmentation(generator(seed, "augmentation"), 4, 20, 24)
    prepared = preparation(x, augmentation, torch.float64)
    for index in range(4):
        own = {key: numbers[index].numpy() for key, numbers in augmentation.items()}
        np.testing.assert_allclose(prepared[index].numpy(), reference(preparation, x[index], own), atol=1e-12)


def test_preparation_leading_axes_do_not_change_result():
    preparation = PREPARATIONS["fedml_cifar10"]
    x = images_for(preparation, 12)
    augmentation = preparation.draw_augmentation(generator(1, "augmentation"), 12, 20, 24)
    block = preparation(
        x.view(2, 3, 2, 3, 20, 24), {name: numbers.view(2, 3, 2, -1) for name, numbers in augmentation.items()}
    )
    assert torch.equal(block.view(12, 3, 20, 24), preparation(x, augmentation))
    one = preparation(x[0], {name: numbers[0] for name, numbers in augmentation.items()})
    assert torch.equal(one, preparation(x, augmentation)[0])


def test_preparation_crop_padding_is_black_or_zero_after_normalization():
    x = torch.full((1, 1, 4, 4), 255, dtype=torch.uint8)
    corner = {"crop": torch.zeros(1, 2, dtype=torch.int64)}
    assert Preparation((0.5,), (0.25,), crop_padding=2)(x, corner)[0, 0, 0, 0] == -2
    assert Preparation((0.5,), (0.25,), crop_padding=2, pad_normalized=True)(x, corner)[0, 0, 0, 0] == 0


def test_draw_augmentation_is_in_range_and_has_shape():
    preparation = Preparation(size=(32, 40), crop_padding=4, crop_chance=0.5, flip=True, cutout=6)
    augmentation = preparation.draw_augmentation(generator(0, "augmentation"), 4000, 8, 8)
    assert {name: tuple(numbers.shape) for name, numbers in augmentation.items()} == {
        "crop": (4000, 2),
        "flip": (4000, 1),
        "cutout": (4000, 2),
    }
    assert augmentation["crop"].min() == 0 and augmentation["crop"].max() == 8
    unmoved = (augmentation["crop"] == 4).all(1).float().mean()
    assert abs(unmoved - (0.5 + 0.5 / 81)) < 0.04
    assert abs(augmentation["flip"].float().mean() - 0.5) < 0.04
    assert augmentation["cutout"].amax(0).tolist() == [31, 39]


def test_draw_augmentation_depends_only_on_generator():
    preparation = PREPARATIONS["fedml_cifar10"]
    np.random.seed(1)
    torch.manual_seed(1)
    first = preparation.draw_augmentation(generator(3, "a"), 10, 32, 32)
    np.random.seed(2)
    torch.manual_seed(2)
    second = preparation.draw_augmentation(generator(3, "a"), 10, 32, 32)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_draw_augmentation_without_augmentation_is_empty():
    assert PREPARATIONS["heterofl_mnist"].draw_augmentation(generator(0), 5, 28, 28) == {}
    x = images_for(PREPARATIONS["heterofl_cifar10"], 2)
    assert torch.equal(PREPARATIONS["heterofl_cifar10"](x), PREPARATIONS["heterofl_cifar10"](x, {}))


def test_preparation_non_images_are_unchanged():
    tokens = torch.randint(0, 100, (3, 7))
    assert PREPARATIONS["plain"](tokens) is tokens
    rows = torch.rand(5, 6, dtype=torch.float64)
    assert torch.equal(PREPARATIONS["plain"](rows), rows.float())
    series = torch.rand(5, 6, 7)
    assert torch.equal(PREPARATIONS["plain"](series), series)


@pytest.mark.parametrize("shape", [(3,), (3, 7), (3, 4, 5), (3, 2, 4, 5)])
@pytest.mark.parametrize("leading", [(6,), (2, 6)])
def test_preparation_normalizes_per_channel_whatever_the_axes(shape, leading):
    """With leading axes for devices, [2, 6, 3, 7] are time series and not images."""
    mean, std = (0.5, -1.0, 0.25), (2.0, 0.5, 4.0)
    x = torch.rand(*leading, *shape)
    made = Preparation(mean, std).for_shape(shape)(x)
    for channel in range(3):
        at = (..., channel, *[slice(None)] * (len(shape) - 1))
        assert torch.allclose(made[at], (x[at] - mean[channel]) / std[channel])
    assert torch.allclose(Preparation((0.5,), (2.0,)).for_shape(shape)(x), (x - 0.5) / 2)


@pytest.mark.parametrize("step", ["size", "channels", "crop_padding", "flip", "cutout"])
@pytest.mark.parametrize(
    ("shape", "is_text", "kind"), [((9, 128), False, "time series"), ((5,), False, "rows"), ((5,), True, "tokens")]
)
def test_preparation_image_step_of_others_is_named(step, shape, is_text, kind):
    value = {"size": (8, 8), "flip": True}.get(step, 3)
    with pytest.raises(ValueError, match=f"{step} of a preparation is for images, and these are {kind}"):
        Preparation(**{step: value}).for_shape(shape, is_text)


def test_preparation_wrong_number_of_means_is_named():
    three = Preparation((0.1,) * 3, (1.0,) * 3)
    with pytest.raises(ValueError, match="have 3 numbers, and there are 9 channels"):
        three.for_shape((9, 128))
    with pytest.raises(ValueError, match="have 3 numbers, and there are 5 features"):
        three.for_shape((5,))
    with pytest.raises(ValueError, match="mean and std of a preparation are for numbers"):
        three.for_shape((5,), is_text=True)
    with pytest.raises(ValueError, match="mask_chance of a preparation is for tokens"):
        Preparation(mask_chance=0.1, mask_token=3).for_shape((5,))
    with pytest.raises(ValueError, match="an example has 3 axes here, but x has 2"):
        three(torch.zeros(4, 3))


def test_preparation_many_means_are_counted_in_words():
    assert str(Preparation((0.0,) * 561, (1.0,) * 561)) == "Scale bytes to 0..1, normalize by 561 means and stds."


def test_preparation_floats_are_not_divided_and_gray_is_repeated():
    x = torch.rand(2, 1, 4, 4)
    assert torch.equal(Preparation()(x), x)
    assert torch.equal(Preparation(channels=3)(x), x.repeat(1, 3, 1, 1))
    colour = torch.rand(2, 3, 4, 4)
    assert torch.equal(Preparation(channels=3)(colour), colour)


def test_preparation_default_dtype_is_torchs():
    x = torch.zeros(1, 1, 2, 2, dtype=torch.uint8)
    assert PREPARATIONS["plain"](x).dtype == torch.float32
    assert PREPARATIONS["plain"](x, dtype=torch.float64).dtype == torch.float64


def test_preparation_changes_nothing_in_place():
    x = images_for(PREPARATIONS["fedml_cifar10"], 3)
    before = x.clone()
    PREPARATIONS["fedml_cifar10"](x, PREPARATIONS["fedml_cifar10"].draw_augmentation(generator(0), 3, 20, 24))
    assert torch.equal(x, before)


def test_preparation_accepts_empty_batch():
    empty = torch.zeros(0, 1, 28, 28, dtype=torch.uint8)
    assert PREPARATIONS["fedsup_fashion"](empty).shape == (0, 3, 32, 32)


@pytest.mark.parametrize(
    ("name", "stored", "black"),
    [
        ("imagenet_cifar", (3, 32, 32), (-0.485 / 0.229, -0.456 / 0.224, -0.406 / 0.225)),
        ("cifar100", (3, 32, 32), (-0.507 / 0.267, -0.487 / 0.256, -0.441 / 0.276)),
        ("fedsup_fashion", (1, 28, 28), (-0.2860 / 0.3530,) * 3),
        ("fedsup_pathmnist", (3, 28, 28), (-1.0,) * 3),
        ("feddyn_cifar10", (3, 32, 32), (-0.491 / 0.247, -0.482 / 0.243, -0.447 / 0.262)),
        ("feddyn_cifar100", (3, 32, 32), (-0.5071 / 0.2675, -0.4867 / 0.2565, -0.4408 / 0.2761)),
    ],
)
def test_preparation_named_values_match_fedsup_and_fedhen(name, stored, black):
    preparation = PREPARATIONS[name]
    result = preparation(torch.zeros(1, *stored, dtype=torch.uint8))
    assert result.shape == (1, 3, 32, 32)
    assert torch.allclose(result, torch.tensor(black).view(1, 3, 1, 1))
    assert (preparation.crop_padding, preparation.flip) == (4, True)
    assert preparation.crop_chance == (0.5 if name.startswith("feddyn") else 1.0)


@pytest.mark.parametrize(
    "options",
    [
        {"mean": (0.5,)},
        {"mean": (0.5,), "std": (0.0,)},
        {"crop_chance": 1.5},
        {"crop_padding": -1},
        {"cutout": -2},
        {"mask_chance": 1.5, "mask_token": 3},
        {"mask_chance": 0.5},
    ],
)
def test_preparation_impossible_option_raises(options):
    with pytest.raises(ValueError, match=r"mean|crop_chance|crop_padding|mask_chance"):
        Preparation(**options)
