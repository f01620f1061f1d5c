"""fedloom: its FedAvg on one tier, in as many processes as the others get cores."""

import torch

from benchmarks.peers.work import Block, Laps, Net, answer, initial, pixels, read


def main() -> None:
    work = read()
    torch.set_num_threads(1)
    laps = Laps()
    weights = rounds(work, laps)
    from importlib.metadata import version

    answer(work, laps, weights, version("fedloom"))


def rounds(work: Block, laps: Laps) -> dict[str, torch.Tensor]:
    from benchmarks.rounds import engine_for, timed_rounds
    from fedloom.data import Dataset, Examples, Partition, Preparation
    from fedloom.engines import keep_the_heap
    from fedloom.fleet import Fleet, make_nested_tiers
    from fedloom.methods.fedavg import FedAvg
    from fedloom.models import model

    keep_the_heap()
    x, y = pixels(work)
    fleet = Fleet(
        make_nested_tiers([("all", model("net", Net, {"channels": work.channels}, (1, 28, 28), 10))]), (1.0,), work.devices, 0
    )
    rows = torch.arange(len(y)).split(work.share)
    partition = Partition(tuple(own.numpy() for own in rows), tuple(own[:1].numpy() * 0 for own in rows))
    dataset = Dataset("made up", Examples(x, y), Examples(x[:10], y[:10]), 10, Preparation())
    method = FedAvg()
    engine = engine_for(method, fleet, dataset, partition, work.workers)
    start = method.start(fleet, 0, initial(work))
    for _, server in timed_rounds(method, start, fleet, engine, work.devices, work.rounds):
        laps.lap()
        weights = dict(server["weights"])
    engine.close()
    return weights


if __name__ == "__main__":
    main()
