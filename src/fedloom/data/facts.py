"""What is known of a data set without its files, so that a recipe can be checked and costed anywhere."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    shape: tuple[int, ...]  # of one example as it is stored
    classes: int
    train: int
    test: int
    preparation: str  # unless the recipe names another


FACTS: dict[str, Facts] = {
    "digits": Facts((1, 8, 8), 10, 1_437, 360, "plain"),
    "fashion-mini": Facts((1, 28, 28), 10, 2_000, 500, "fashion"),
    "mnist": Facts((1, 28, 28), 10, 60_000, 10_000, "heterofl_mnist"),
    "fashion-mnist": Facts((1, 28, 28), 10, 60_000, 10_000, "fashion"),
    "cifar10": Facts((3, 32, 32), 10, 50_000, 10_000, "heterofl_cifar10"),
    "cifar100": Facts((3, 32, 32), 100, 50_000, 10_000, "cifar100"),
    "pathmnist": Facts((3, 28, 28), 9, 89_996, 7_180, "fedsup_pathmnist"),
    "pneumoniamnist": Facts((1, 28, 28), 2, 4_708, 624, "plain"),
}
