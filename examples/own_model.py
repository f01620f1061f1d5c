"""Train a model of your own, a plain torch module: devices get slices of it, found by comparing shapes."""

from torch import nn

import fedloom as fl


def two_layers(*, input_shape: tuple[int, ...], classes: int, width: float = 1.0, hidden: int = 32) -> nn.Module:
    """`input_shape` and `classes` come from the data; everything else is a setting."""
    units = max(1, round(hidden * width))
    pixels = input_shape[0] * input_shape[1] * input_shape[2]
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, units), nn.ReLU(), nn.Linear(units, classes))


sim = fl.Simulation(
    dataset="digits",
    devices=6,
    tiers=fl.tiers(two_layers, {"hidden": 64}, large={"share": 0.5}, small={"share": 0.5, "width": 0.25}),
    method="heterofl",
    client=fl.ClientConfig(epochs=2, batch_size=20, optimizer=fl.optimizers.adam(lr=0.003)),
)
for result in sim.rounds(5):
    print(result.number, {tier: round(values["accuracy"], 1) for tier, values in result.metrics.items()})

small, large = sim.model("small"), sim.model("large")
sizes = [sum(weight.numel() for weight in model.parameters()) for model in (small, large)]
print("parameters of small and large:", sizes)
assert sizes[0] < sizes[1] / 3
