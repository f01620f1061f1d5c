"""Stop a simulation when it no longer gets better: the iterator is the callback."""

import fedloom as fl

PATIENCE = 2  # rounds without a better result

sim = fl.Simulation(
    dataset="digits",
    partition=fl.partitions.dirichlet(devices=8, alpha=0.5),
    tiers=fl.tiers(fl.models.mlp, {"hidden": [64]}, large={"share": 0.5}, small={"share": 0.5, "width": 0.5}),
    method="heterofl",
    client=fl.ClientConfig(optimizer=fl.optimizers.sgd(lr=0.3)),
)

best, best_round = 0.0, 0
for result in sim.rounds(20):
    worst_tier = min(values["accuracy"] for values in result.metrics.values())
    print(f"round {result.number}: worst tier {worst_tier:.1f} %")
    if worst_tier > best:
        best, best_round = worst_tier, result.number
    if result.number - best_round >= PATIENCE:
        break

print(f"stopped after round {result.number}; best was {best:.1f} % in round {best_round}")
model = sim.model("small")  # a torch module, as it was in the round that stopped
assert result.number - best_round == PATIENCE
assert max(row.round for row in sim.run.rows()) == result.number  # what was recorded ends there too
