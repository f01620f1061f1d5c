"""A folder for each user, as devices leave them behind: arrays, or images in a folder for each class.

phones/ada/train.npz    phones/ada/test.npz       arrays x and y; without test.npz some examples are held out
phones/ada/cat/1.png    phones/ada/dog/2.png      images by class; some are held out
phones/ada/train/cat/1.png   phones/ada/test/...  the same with a test set
"""

import importlib
from pathlib import Path

import numpy as np

from ..files import is_folder
from ..settings import Count, Fraction
from .adapters import Kind, assemble_dataset
from .dataset import DataBroken, Dataset
from .npz import find_own, load_arrays
from .raw import Array, RawExamples, concatenate, split_off_test

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
_LAYOUT = "Each folder in it is a user, with train.npz (x and y) and perhaps test.npz, or with a folder per class."


def folder(
    *,
    folder: Path,
    path: str,
    classes: Count | None = None,
    kind: Kind | None = None,
    normalize: bool = False,
    test_share: Fraction = 0.2,
) -> Dataset:
    """A folder with one folder per user: `user/train.npz` and `user/test.npz`, or images in `user/class/`.

    Users are the groups of the examples, which the partition "natural" gives to one device each. Arrays are named x and
    y. Images need Pillow; all must have one size. Classes are numbered in the order of their names.

    Parameters
    ----------
    path : the folder, searched in the data directory, then in the working directory.
    classes : the number of classes, if no user has examples of the last ones; None: the data tells.
    kind : "image", "series" (time series [n, channels, length]), "tabular" or "tokens"; None: two axes are rows, or
        tokens if they are whole numbers other than bytes; three or four are images.
    normalize : whether to normalize with the mean and the standard deviation of the training examples.
    test_share : the share of every user's examples that is held out for testing, where there is no test set.
    """
    root = find_own(path, folder, is_folder)
    users = [user for user in _visible(root) if user.is_dir()]
    if not users:
        raise DataBroken(f"{root} has no folders of users", _LAYOUT)
    pairs = [_read_user(user) for user in users]
    train, test = ([pair[index] for pair in pairs if len(pair) == 2] for index in (0, 1))
    whole = [pair[0] for pair in pairs if len(pair) == 1]
    if whole:
        kept, held_out = split_off_test(concatenate(whole, str(root)), test_share, str(root))
        train, test = [*train, kept], [*test, held_out]
    parts = [concatenate(part, str(root)) for part in (train, test)]
    return assemble_dataset(root.name, str(root), parts, classes=classes, kind=kind, normalize=normalize)


def _read_user(user: Path) -> list[RawExamples]:
    """A user's examples, or training and test set, if there are both."""
    if (user / "train.npz").is_file():
        files = [file for file in (user / "train.npz", user / "test.npz") if file.is_file()]
        return [_read_npz(file, user.name) for file in files]
    folders = {one.name: one for one in _visible(user) if one.is_dir()}
    if set(folders) == {"train", "test"}:
        return [_read_classes(folders[part], user.name) for part in ("train", "test")]
    return [_read_classes(user, user.name)]


def _read_npz(path: Path, user: str) -> RawExamples:
    content = load_arrays(path, ("x", "y"))
    if set(content) != {"x", "y"}:
        raise DataBroken(f"{path} lacks the arrays x and y", "Save it with numpy.savez(path, x=..., y=...).")
    return RawExamples(content["x"], content["y"], np.full(len(content["y"]), user))


def _read_classes(user: Path, name: str) -> RawExamples:
    files = [
        (file, label.name)
        for label in _visible(user)
        if label.is_dir()
        for file in _visible(label)
        if file.suffix.lower() in IMAGES
    ]
    if not files:
        raise DataBroken(f"{user} has neither train.npz nor images in folders of classes", _LAYOUT)
    images = [_read_image(file) for file, _ in files]
    odd = next((n for n, image in enumerate(images) if image.shape != images[0].shape), None)
    if odd is not None:
        shapes = f"{images[0].shape} in {files[0][0]} and {images[odd].shape} in {files[odd][0]}"
        raise DataBroken(f"images differ in shape, {shapes}", "Save all in one size, all gray or all in color.")
    return RawExamples(np.stack(images), np.array([label for _, label in files]), np.full(len(files), name))


def _read_image(path: Path) -> Array:
    """Gray [height, width] or color [height, width, 3] as bytes."""
    try:
        pillow = importlib.import_module("PIL.Image")
    except ImportError:
        raise DataBroken(f"{path} cannot be read without Pillow", "Install it with pip install pillow.") from None
    try:
        with pillow.open(path) as image:
            return np.asarray(image.convert("L" if image.mode in ("1", "L", "LA", "I;16") else "RGB"))
    except OSError as error:
        raise DataBroken(f"{path} cannot be read: {error}", "Save it again, or remove it.") from error


def _visible(folder: Path) -> list[Path]:
    """What is in a folder, by name."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
