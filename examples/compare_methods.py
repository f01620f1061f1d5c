"""Compare methods over paired seeds, with a verdict that takes noise into account."""

import tempfile
from pathlib import Path

import fedloom as fl

sim = fl.Simulation(
    dataset="digits",
    partition=fl.partitions.dirichlet(devices=8, alpha=0.5),
    tiers=fl.tiers(fl.models.mlp, {"hidden": [64]}, large={"share": 0.5}, small={"share": 0.5, "width": 0.5}),
    method="heterofl",
    client=fl.ClientConfig(optimizer=fl.optimizers.sgd(lr=0.3)),
    rounds=2,
)

with tempfile.TemporaryDirectory() as folder:
    result = fl.compare(sim, seeds=2, methods=["fedrolex"], out=Path(folder, "comparison"))
    print(result)  # in a notebook: a table
    by_arm = {record["arm"]: record for record in result.records()}
    assert by_arm["heterofl"]["worst_tier"] <= by_arm["heterofl"]["small"] <= 100  # accuracy in %, mean over seeds
    assert result.verdict
    assert len(result.runs("fedrolex")) == 2  # every arm and seed is a run like any other
