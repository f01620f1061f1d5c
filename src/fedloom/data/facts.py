"""What is known of a data set without its files, so that a recipe can be checked and costed anywhere."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    stored_shape: tuple[int, ...]
    classes: int
    train: int
    test: int


FACTS: dict[str, Facts] = {
    "digits": Facts((1, 8, 8), 10, 1_437, 360),
    "fashion-mini": Facts((1, 28, 28), 10, 2_000, 500),
    "mnist": Facts((1, 28, 28), 10, 60_000, 10_000),
    "fashion-mnist": Facts((1, 28, 28), 10, 60_000, 10_000),
    "cifar10": Facts((3, 32, 32), 10, 50_000, 10_000),
    "cifar100": Facts((3, 32, 32), 100, 50_000, 10_000),
    "pathmnist": Facts((3, 28, 28), 9, 89_996, 7_180),
    "pneumoniamnist": Facts((1, 28, 28), 2, 4_708, 624),
}
