"""pfl: its simulated backend and FederatedAveraging, in as many processes as there are cores, joined by gloo."""

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

from benchmarks.peers.work import BATCH, CLIP, DECAY, MOMENTUM, RATE, Block, Laps, Net, answer, initial, own, read

RANK, ADDRESSES = "PFL_WORKER_RANK", "PFL_WORKER_ADDRESSES"


class Trained(Net):
    """The net with what pfl asks of one."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, object]:
        """Nothing: pfl evaluates every device in its first round, and the others do not."""
        return {}


def main() -> None:
    work, laps = read(), Laps()
    torch.set_num_threads(1)
    others = [] if RANK in os.environ else company(work)
    weights = simulate(work, laps)
    if os.environ.get(RANK, "0") == "0":
        from importlib.metadata import version

        answer(work, laps, weights, version("pfl"))
    for other in others:
        other.wait()


def company(work: Block) -> list[subprocess.Popen[str]]:
    """Start the other workers; this process is the first."""
    if work.workers == 1:
        return []
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    os.environ.update({RANK: "0", ADDRESSES: ",".join([address] * work.workers)})
    return [_worker(work, rank) for rank in range(1, work.workers)]


def _worker(work: Block, rank: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.peers.pfl"]
    process = subprocess.Popen(command, env={**os.environ, RANK: str(rank)}, text=True, stdin=subprocess.PIPE)
    assert process.stdin
    process.stdin.write(dumps(asdict(work)))
    process.stdin.close()
    return process


def simulate(work: Block, laps: Laps) -> dict[str, Tensor]:
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
        def after_central_iteration(self, *said: object, **more: object) -> tuple[bool, Metrics]:
            laps.lap()
            return False, Metrics()

    net = Trained(work.channels)
    net.load_state_dict(initial(work))
    model = PyTorchModel(
        net,
        partial(torch.optim.SGD, momentum=MOMENTUM, weight_decay=DECAY),
        torch.optim.SGD(net.parameters(), lr=1.0),
    )
    users = FederatedDataset(
        lambda user: PyTorchTensorDataset(own(work, user), user_id=str(user)),
        get_user_sampler("minimize_reuse", list(range(work.devices))),
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=work.rounds, evaluation_frequency=10**9, train_cohort_size=work.devices,
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
