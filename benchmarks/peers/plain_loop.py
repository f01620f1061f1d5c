"""The plain loop: one process, eager torch, one device after the other."""

import torch
from torch import Tensor

from benchmarks.peers.workload import Laps, Workload, initial_weights, read_input, train_device, write_result


def main() -> None:
    workload, laps = read_input(), Laps()
    write_result(workload, laps, rounds(workload, laps), f"torch {torch.__version__}")


def rounds(workload: Workload, laps: Laps) -> dict[str, Tensor]:
    weights = initial_weights(workload)
    for _ in range(workload.rounds):
        uploads = [train_device(workload, weights, device) for device in range(workload.devices)]
        weights = {name: torch.stack([weights_of[name] for weights_of in uploads]).mean(0) for name in weights}
        laps.lap()
    return weights


if __name__ == "__main__":
    main()
