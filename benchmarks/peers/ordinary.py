"""The ordinary loop: one process, eager torch, one device after the other."""

import torch
from torch import Tensor

from benchmarks.peers.work import Block, Laps, answer, initial, read, trained


def main() -> None:
    work, laps = read(), Laps()
    answer(work, laps, rounds(work, laps), f"torch {torch.__version__}")


def rounds(work: Block, laps: Laps) -> dict[str, Tensor]:
    weights = initial(work)
    for _ in range(work.rounds):
        sent = [trained(work, weights, device) for device in range(work.devices)]
        weights = {name: torch.stack([one[name] for one in sent]).mean(0) for name in weights}
        laps.lap()
    return weights


if __name__ == "__main__":
    main()
