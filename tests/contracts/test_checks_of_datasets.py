"""`check_dataset` works: bundled data passes, and each mistake is found by the check for it."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from fedloom.data import DATASETS, Dataset, Examples, Preparation, as_dataset
from fedloom.testing import DATASET_CHECKS, CheckFailed, check_dataset


@pytest.mark.parametrize("name", ["digits", "fashion-mini"])
def test_check_dataset_of_bundled_data_passes(name: str) -> None:
    report = check_dataset(DATASETS[name])
    assert report.passed == tuple(DATASET_CHECKS)
    assert report.notes == {}


def images(seed: int = 0, classes: int = 3, **changes: Any) -> Dataset:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (30, 1, 6, 6), dtype=torch.uint8, generator=draw)
    y = torch.arange(30) % classes
    preparation = Preparation(mean=(0.5,), std=(0.3,), crop_padding=1, flip=True)
    made = Dataset("images", Examples(x[:20], y[:20]), Examples(x[20:], y[20:]), classes, preparation)
    return replace(made, **changes)


def tokens(label_per_token: bool = False) -> Dataset:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 4, (24, 5), generator=draw)
    y = x if label_per_token else torch.arange(24) % 4
    groups = torch.arange(16) % 3, torch.arange(8) % 3
    preparation = Preparation(mask_chance=0.2, mask_token=4)
    return Dataset("tokens", Examples(x[:16], y[:16]), Examples(x[16:], y[16:]), 4, preparation, 5, groups)


def pair() -> Any:
    draw = torch.Generator().manual_seed(0)
    return torch.rand(30, 5, generator=draw), torch.arange(30) % 3


def series() -> Dataset:
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(30, 3, 8, generator=draw)
    return as_dataset((x, torch.arange(30) % 3), kind="series", normalize=True, class_names=["a", "b", "c"])


@pytest.mark.parametrize("load", [images, tokens, lambda: tokens(True), pair, series])
def test_check_dataset_of_own_function_passes(load: Callable[..., Dataset]) -> None:
    assert check_dataset(load).passed == tuple(DATASET_CHECKS)


def test_check_dataset_passes_options_on() -> None:
    assert check_dataset(images, seed=3, classes=5).notes == {}
    with pytest.raises(CheckFailed, match="check_loading failed") as failed:
        check_dataset(images, colors=3)
    assert "colors" in failed.value.found


def changed_labels() -> Dataset:
    made = images()
    made.train.y[3] = 7
    return made


def huge() -> Dataset:
    made = images(preparation=Preparation())
    numbers = Examples(torch.full((20, 36), 1e30), made.train.y), Examples(torch.full((10, 36), 1e30), made.test.y)
    return replace(made, train=numbers[0], test=numbers[1])


def not_finite() -> Dataset:
    made = images()
    train, test = (one.x.float() for one in (made.train, made.test))
    test[2, 0, 1] = torch.nan
    return replace(made, train=Examples(train, made.train.y), test=Examples(test, made.test.y))


def other_shape() -> Dataset:
    made = images()
    return replace(made, test=Examples(made.test.x[..., :4], made.test.y))


class Unsteady(Preparation):
    """Draws where it should not."""

    def __call__(self, x: Any, augmentation: Any = None, dtype: Any = None) -> Any:
        made = super().__call__(x, augmentation, dtype)
        return made + torch.rand_like(made) if augmentation else made


SEEDS = count()
BROKEN: list[tuple[str, str, Callable[..., Any]]] = [
    ("check_loading", "fingerprint", lambda: images(next(SEEDS))),
    ("check_loading", "a fedloom.data.Dataset", lambda: (torch.zeros(3), torch.zeros(3))),
    ("check_labels", "labels from 0 to 7", changed_labels),
    ("check_labels", "one each", lambda: images(groups=(torch.arange(3), torch.arange(10)))),
    ("check_examples", "one shape and dtype", other_shape),
    ("check_examples", "a test example holds NaN", not_finite),
    ("check_preparation", "same draws", lambda: images(preparation=Unsteady((0.5,), (0.3,), flip=True))),
    ("check_dataset_trains", "HUGE", huge),
]
BROKEN.append(("check_labels", "With 2 classes labels run from 0 to 1", lambda: replace(images(), classes=2)))


@pytest.mark.parametrize(("check", "message", "load"), BROKEN, ids=[f"{one[0]}-{n}" for n, one in enumerate(BROKEN)])
def test_check_dataset_of_broken_data_fails_its_check(check: str, message: str, load: Callable[..., Any]) -> None:
    with pytest.raises(CheckFailed) as failed:
        check_dataset(load)
    assert failed.value.check == check
    assert message in str(failed.value)
    assert failed.value.hint


def test_check_dataset_leaks_and_missing_classes_are_noted() -> None:
    made = images()
    leaking = replace(made, test=Examples(torch.cat([made.test.x[:4], made.train.x[:3]]), made.train.y[:7]), classes=4)
    notes = check_dataset(lambda: leaking).notes
    assert notes["check_separation"] == "3 of 7 test examples are also training examples"
    assert notes["check_labels"] == "no training example of 1 of 4 classes, such as 3"
