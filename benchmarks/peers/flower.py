"""Flower's simulation on Ray: its own FedAvg strategy, one CPU a client, the ordinary loop on the client."""

import os
import tempfile
from typing import Any

from torch import Tensor

from benchmarks.peers.work import Block, Laps, answer, initial, read, trained

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}  # fmt: skip


def main() -> None:
    work, laps = read(), Laps()
    with tempfile.TemporaryDirectory() as home:
        os.environ.update(QUIET, FLWR_HOME=home)
        weights = simulate(work, laps)
    from importlib.metadata import version

    answer(work, laps, weights, f"{version('flwr')}, ray {version('ray')}")


def simulate(work: Block, laps: Laps) -> dict[str, Tensor]:
    from flwr.simulation import run_simulation

    final: dict[str, Tensor] = {}
    run_simulation(
        server_app=_server(work, laps, final),
        client_app=_client(work),
        num_supernodes=work.devices,
        backend_config={"init_args": {"num_cpus": work.workers}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    assert len(laps.seconds) == work.rounds
    return final


def _client(work: Block) -> Any:
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        weights = message.content["arrays"].to_torch_state_dict()
        made = trained(work, weights, int(context.node_config["partition-id"]))
        metrics = MetricRecord({"num-examples": work.share})
        return Message(RecordDict({"arrays": ArrayRecord(made), "metrics": metrics}), reply_to=message)

    return app


def _server(work: Block, laps: Laps, final: dict[str, Tensor]) -> Any:
    from flwr.app import ArrayRecord, Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg

    app = ServerApp()

    def after(number: int, arrays: ArrayRecord) -> None:
        if number:
            laps.lap()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=work.devices)
        done = strategy.start(grid, ArrayRecord(initial(work)), work.rounds, evaluate_fn=after)
        final.update(done.arrays.to_torch_state_dict())

    return app


if __name__ == "__main__":
    main()
