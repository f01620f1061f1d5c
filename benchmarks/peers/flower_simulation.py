"""Flower's simulation on Ray: its own FedAvg strategy, one CPU per client, the plain loop on the client."""

import os
import tempfile
from typing import Any

from torch import Tensor

from benchmarks.peers.workload import Laps, Workload, initial_weights, read_input, train_device, write_result

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}  # fmt: skip


def main() -> None:
    workload, laps = read_input(), Laps()
    with tempfile.TemporaryDirectory() as home:
        os.environ.update(QUIET, FLWR_HOME=home)
        weights = simulate(workload, laps)
    from importlib.metadata import version

    write_result(workload, laps, weights, f"{version('flwr')}, ray {version('ray')}")


def simulate(workload: Workload, laps: Laps) -> dict[str, Tensor]:
    from flwr.simulation import run_simulation

    final: dict[str, Tensor] = {}
    run_simulation(
        server_app=_server(workload, laps, final),
        client_app=_client(workload),
        num_supernodes=workload.devices,
        backend_config={
            "init_args": {"num_cpus": workload.workers},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    assert len(laps.seconds) == workload.rounds
    return final


def _client(workload: Workload) -> Any:
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        weights = message.content["arrays"].to_torch_state_dict()
        weights = train_device(workload, weights, int(context.node_config["partition-id"]))
        metrics = MetricRecord({"num-examples": workload.share})
        return Message(RecordDict({"arrays": ArrayRecord(weights), "metrics": metrics}), reply_to=message)

    return app


def _server(workload: Workload, laps: Laps, final: dict[str, Tensor]) -> Any:
    from flwr.app import ArrayRecord, Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg

    app = ServerApp()

    def on_round(number: int, arrays: ArrayRecord) -> None:
        if number:
            laps.lap()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=workload.devices)
        result = strategy.start(grid, ArrayRecord(initial_weights(workload)), workload.rounds, evaluate_fn=on_round)
        final.update(result.arrays.to_torch_state_dict())

    return app


if __name__ == "__main__":
    main()
