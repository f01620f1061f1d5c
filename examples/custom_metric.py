"""Evaluate with a metric of your own: a function of logits and labels."""

from torch import Tensor

import fedloom as fl


def top3(logits: Tensor, labels: Tensor) -> float:
    """Percent of the examples whose label is among the three most likely."""
    hits = logits.topk(3).indices == labels[:, None]
    return 100 * float(hits.any(-1).double().mean())


sim = fl.Simulation(
    dataset="digits",
    devices=6,
    tiers=fl.tiers(fl.models.mlp, {"hidden": [64]}, large={"share": 0.5}, small={"share": 0.5, "width": 0.5}),
    method="heterofl",
    client=fl.ClientConfig(optimizer=fl.optimizers.sgd(lr=0.3)),
)
# declare direction and unit to have verdicts and targets about it; a bare function is recorded and drawn
metrics = ["accuracy", "balanced_accuracy", fl.Metric("top3", top3, higher_is_better=True, unit="%")]
for result in sim.rounds(3, metrics=metrics):
    for tier, values in result.metrics.items():
        print(result.number, tier, {name: round(value, 1) for name, value in values.items()})
        assert values["top3"] >= values["accuracy"]
