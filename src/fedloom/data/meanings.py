"""What is known of data sets beside their numbers: what the labels mean, and on what terms the examples may be used."""

CLOTHES = (
    "T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
THINGS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
DIGITS = tuple("0123456789")

LABELS: dict[str, tuple[str, ...]] = {
    "digits": DIGITS,
    "mnist": DIGITS,
    "fashion-mini": CLOTHES,
    "fashion-mnist": CLOTHES,
    "cifar10": THINGS,
    "sentiment140": ("negative", "positive"),
}

LICENCES: dict[str, str] = {
    "digits": "CC BY 4.0",
    "fashion-mini": "MIT",
    "fashion-mnist": "MIT",
    "pathmnist": "CC BY 4.0",
    "pneumoniamnist": "CC BY 4.0",
    "wikitext2": "CC BY-SA 3.0",
}
"""Of those whose makers say so."""
