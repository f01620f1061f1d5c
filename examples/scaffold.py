"""SCAFFOLD: control variates correct the drift of local training. Karimireddy et al., ICML 2020, Algorithm 1."""

from dataclasses import dataclass

import torch

import fedloom as fl
from fedloom.client import ClientResult, fit, gradient, label_loss, like, on_device
from fedloom.footprints import ClientUpdate
from fedloom.methods import Method, MethodInfo
from fedloom.tensors import combine, per_device


@dataclass(frozen=True)
class Scaffold(Method):
    """SCAFFOLD with option II: a device's control variate is its mean gradient of the round, so train with plain SGD.

    Parameters
    ----------
    global_lr : the step size of the server.
    """

    info = MethodInfo(
        paper="Karimireddy et al., ICML 2020",
        uploads="weights, change of its control variate",
        client_state="its control variate",
        heterogeneity="one model",
    )

    global_lr: float = 1.0

    def start(self, fleet, seed, warm_start=None):
        weights = warm_start or fleet.global_model.initial_weights(seed)
        return {"weights": weights, "control": combine(torch.zeros_like, weights)}

    def init_client(self, device, seed, warm_start=None):
        return {"control": {name: torch.zeros(shape) for name, shape in device.model.shapes().items()}}

    def round(self, server, context):
        replies = context.ask(self.train, dict.fromkeys(context.cohort, server))
        devices = len(context.fleet.eligible_indices(context.number))

        def move(bundle, step):  # by the mean of the devices' changes
            updates = [ClientUpdate(reply.device.footprint, reply.upload[bundle], 1.0) for reply in replies]
            mean = context.aggregate(server[bundle], updates)
            return combine(lambda old, new: old + step * (new - old), server[bundle], mean)

        return {"weights": move("weights", self.global_lr), "control": move("control", len(replies) / devices)}

    @on_device(sends={"weights": like("weights"), "control": like("control")})
    def train(self, client, inbox):
        x, c, c_i = inbox["weights"], inbox["control"], client.state["control"]
        loss = label_loss(client)

        def corrected(y, batch):
            return combine(lambda g, c_i, c: g - c_i + c, gradient(loss, y, batch), c_i, c)

        y = fit(client, x, corrected)
        steps = sum(step.active for step in client.plan)  # [K], each device's own
        lr = client.optimizer.lr or 1.0  # at a rate of 0 nothing has moved
        new = combine(lambda c_i, c, x, y: c_i - c + (x - y) / per_device(steps, x) / lr, c_i, c, x, y)
        sent = combine(lambda c, new, c_i: c + (new - c_i), c, new, c_i)
        return ClientResult(upload={"weights": y, "control": sent}, state={"control": new})


METHODS = {"scaffold": Scaffold}

if __name__ == "__main__":
    for method in (Scaffold(), "fedavg"):
        sim = fl.Simulation(
            dataset="digits",
            partition=fl.partitions.dirichlet(devices=10, alpha=0.1),
            tiers=fl.tiers("mlp", {"hidden": [64]}, all={"share": 1.0}),
            method=method,
            client=fl.ClientConfig(epochs=3, last_batch="wrap", optimizer=fl.optimizers.sgd(lr=0.1)),
        )
        print(method, [round(result.metrics["all"]["accuracy"], 1) for result in sim.rounds(8)])
