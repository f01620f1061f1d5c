"""pfl: its simulated backend and FederatedAveraging, with one process per core, connected by gloo."""

import os
import socket
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from json import dumps

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.peers.workload import (
    BATCH,
    CLIP,
    DECAY,
    MOMENTUM,
    RATE,
    Laps,
    Net,
    Workload,
    device_examples,
    initial_weights,
    read_input,
    write_result,
)

RANK, ADDRESSES = "PFL_WORKER_RANK", "PFL_WORKER_ADDRESSES"


class PflNet(Net):
    """The network with the methods that pfl requires."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, object]:
        """None: pfl would evaluate every device in its first round, which the other systems do not."""
        return {}


def main() -> None:
    workload, laps = read_input(), Laps()
    torch.set_num_threads(1)
    others = [] if RANK in os.environ else start_workers(workload)
    weights = simulate(workload, laps)
    if os.environ.get(RANK, "0") == "0":
        from importlib.metadata import version

        write_result(workload, laps, weights, version("pfl"))
    for other in others:
        other.wait()


def start_workers(workload: Workload) -> list[subprocess.Popen[str]]:
    """Start the other workers; this process is the first."""
    if workload.workers == 1:
        return []
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    os.environ.update({RANK: "0", ADDRESSES: ",".join([address] * workload.workers)})
    return [_worker(workload, rank) for rank in range(1, workload.workers)]


def _worker(workload: Workload, rank: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.peers.pfl_simulation"]
    process = subprocess.Popen(command, env={**os.environ, RANK: str(rank)}, text=True, stdin=subprocess.PIPE)
    assert process.stdin
    process.stdin.write(dumps(asdict(workload)))
    process.stdin.close()
    return process


def simulate(workload: Workload, laps: Laps) -> dict[str, Tensor]:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Lap(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, *args: object, **kwargs: object) -> tuple[bool, Metrics]:
            laps.lap()
            return False, Metrics()

    net = PflNet(workload.channels)
    net.load_state_dict(initial_weights(workload))
    model = PyTorchModel(
        net,
        partial(torch.optim.SGD, momentum=MOMENTUM, weight_decay=DECAY),
        torch.optim.SGD(net.parameters(), lr=1.0),
    )
    users = FederatedDataset(
        lambda user: PyTorchTensorDataset(device_examples(workload, user), user_id=str(user)),
        get_user_sampler("minimize_reuse", list(range(workload.devices))),
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=workload.rounds, evaluation_frequency=10**9, train_cohort_size=workload.devices,
            val_cohort_size=0,
        ),
        SimulatedBackend(users, users),
        model,
        NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=RATE, local_batch_size=BATCH, local_max_grad_norm=CLIP
        ),
        callbacks=[Lap()],
        send_metrics_to_platform=False,
    )  # fmt: skip
    return {name: weight.detach().clone() for name, weight in net.named_parameters()}


if __name__ == "__main__":
    main()
