"""fedloom: its FedAvg on one tier, with one process per core."""

from dataclasses import replace

import torch

from benchmarks.peers.workload import Laps, Net, Workload, initial_weights, raw_examples, read_input, write_result


def main() -> None:
    workload = read_input()
    torch.set_num_threads(1)
    laps = Laps()
    weights = run_rounds(workload, laps)
    from fedloom import __version__

    write_result(workload, laps, weights, __version__)


def run_rounds(workload: Workload, laps: Laps) -> dict[str, torch.Tensor]:
    from benchmarks.rounds import build_engine, time_rounds
    from fedloom.data import Dataset, Examples, Partition, Preparation
    from fedloom.engines import keep_freed_memory
    from fedloom.fleet import Fleet, make_nested_tiers
    from fedloom.methods.fedavg import FedAvg
    from fedloom.models import build_model, choose_kernels

    keep_freed_memory()
    x, y = raw_examples(workload)
    model = build_model("net", Net, {"channels": workload.channels}, (1, 28, 28), 10)
    model = replace(model, kernels=choose_kernels("auto", model))  # as a recipe does
    fleet = Fleet(make_nested_tiers([("all", model)]), (1.0,), workload.devices, 0)
    rows = torch.arange(len(y)).split(workload.share)
    partition = Partition(tuple(own.numpy() for own in rows), tuple(own[:1].numpy() * 0 for own in rows))
    dataset = Dataset("random", Examples(x, y), Examples(x[:10], y[:10]), 10, Preparation())
    method = FedAvg()
    engine = build_engine(method, fleet, dataset, partition, workload.workers)
    start = method.start(fleet, 0, initial_weights(workload))
    for _, server in time_rounds(method, start, fleet, engine, workload.devices, workload.rounds):
        laps.lap()
        weights = dict(server["weights"])
    engine.close()
    return weights


if __name__ == "__main__":
    main()
