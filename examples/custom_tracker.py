"""Send every value of a run to a tool of your own: a function of a round's rows, or an object with three methods."""

import fedloom as fl

curves: dict[str, list[float]] = {}


def remember(rows: list) -> None:
    """The smallest tracker is a function; it gets all rows of a round."""
    for row in rows:
        if row.metric == "accuracy" and row.test == "global":
            curves.setdefault(row.tier, []).append(row.value)


class Summary(fl.Tracker):
    """A tracker that also learns how the run begins and ends."""

    def begin(self, run) -> None:
        self.name, self.count = run.name, 0

    def rows(self, rows) -> None:
        self.count += len(rows)

    def end(self, status: str) -> None:
        print(f"{self.name}: {self.count} rows, {status}")


sim = fl.Simulation(
    dataset="digits",
    devices=6,
    tiers=fl.tiers(fl.models.mlp, {"hidden": [64]}, large={"share": 0.5}, small={"share": 0.5, "width": 0.5}),
    method="heterofl",
    client=fl.ClientConfig(optimizer=fl.optimizers.sgd(lr=0.3)),
)
summary = Summary()
for _ in sim.rounds(3, track=["csv", remember, summary]):
    pass
print(curves)
assert summary.count > 0 and all(len(curve) == 3 for curve in curves.values())
assert (sim.folder / "rows.csv").is_file()
