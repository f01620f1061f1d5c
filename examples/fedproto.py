"""FedProto: devices with any models share the mean features of each class. Tan et al., AAAI 2022, Algorithm 1."""

from dataclasses import dataclass

import torch
from torch.nn.functional import one_hot

import fedloom as fl
from fedloom.client import ClientResult, fit, like, on_device, supervised_loss, with_batchnorm_statistics
from fedloom.methods import MethodInfo, PersonalModels


@dataclass(frozen=True)
class FedProto(PersonalModels):
    """FedProto: features are drawn to the global prototype of their class, the mean over the examples of all devices.

    Equation 6 divides it by the number of devices once more, which would only shrink it, and is left out.

    Parameters
    ----------
    pull : the paper's lambda; the squared distance is divided by the number of features, as in the authors' program.
    """

    info = MethodInfo(
        paper="Tan et al., AAAI 2022",
        uploads="mean features and number of examples of each class",
        client_state="its model",
        produces="personalized",
        heterogeneity="any",
    )

    pull: float = 1.0

    def start(self, fleet, seed, warm_start=None):
        classes, width = fleet.global_model.classes, fleet.global_model.feature_width()
        return {"prototypes": {"mean": torch.zeros(classes, width), "count": torch.zeros(classes)}}

    def round(self, server, context):
        replies = context.ask(self.train, dict.fromkeys(context.cohort, server))
        old, local = server["prototypes"], [reply.upload["prototypes"] for reply in replies]
        count = sum((one["count"] for one in local), torch.zeros_like(old["count"]))
        total = sum((one["count"][:, None] * one["mean"] for one in local), torch.zeros_like(old["mean"]))
        known = torch.where(count > 0, count, old["count"])  # a class that nobody has today keeps its prototype
        return {"prototypes": {"mean": mean_or(old["mean"], total, count), "count": known}}

    @on_device(sends={"prototypes": like("prototypes")}, batch_across_runs=False)
    def train(self, client, inbox):
        old, row = inbox["prototypes"], torch.arange(len(client.seen_labels))[:, None]

        def loss(weights, batch):
            outputs = client.model(weights, batch.x, batch.step_seeds)
            distance = (outputs.taps["features"] - old["mean"][row, batch.y]).square().mean(-1)
            known = old["count"][row, batch.y] > 0
            return supervised_loss(outputs.logits, batch) + self.pull * (distance * known).mean(-1)

        weights = fit(client, client.state["weights"], loss)
        evaluated = with_batchnorm_statistics(client, weights)
        total, count = torch.zeros_like(old["mean"]), torch.zeros_like(old["count"])
        for batch, real in client.train_batches(100):
            features = client.model(evaluated, batch.x).taps["features"]
            member = one_hot(batch.y, client.model.classes).to(features) * real[..., None]  # [K, batch, classes]
            total, count = total + member.mT @ features, count + member.sum(1)
        local = {"mean": mean_or(old["mean"], total, count), "count": count}
        return ClientResult(upload={"prototypes": local}, state={"weights": weights})

    def check_fleet(self, fleet):
        lengths = {tier.name: tier.model.feature_width() for tier in fleet.active_tiers}
        if len(set(lengths.values())) > 1:
            return f"fedproto compares features, so they must have the same length in all tiers, and have {lengths}"
        return super().check_fleet(fleet)


def mean_or(old, total, count):
    return torch.where(count[..., None] > 0, total / count[..., None], old)


METHODS = {"my_fedproto": FedProto}

if __name__ == "__main__":
    for method in (FedProto(), "standalone"):
        sim = fl.Simulation(
            dataset="digits",
            partition=fl.partitions.dirichlet(devices=10, alpha=0.3),
            tiers=fl.tiers(
                large={"share": 0.5, "model": "convnet", "hidden": [16, 32]},
                small={"share": 0.5, "model": "mlp", "hidden": [64, 32]},
            ),
            method=method,
            client=fl.ClientConfig(batch_size=20, last_batch="wrap", optimizer=fl.optimizers.sgd(lr=0.2)),
        )
        *_, last = sim.rounds(6)
        print(method, {row.tier: round(row.value, 1) for row in last.rows if row.test == "local" and not row.device})
