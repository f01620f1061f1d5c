"""The model that a device keeps, looked at: with it the device is judged, statistics of its own examples included."""

from dataclasses import replace

from ...engines.works import Errand, carry_out, works
from ...fleet import Carried, Device, DeviceModel
from ...tensors import Parcel
from ...training import Client, Outcome, Schedule, own_statistics
from ..assembly.assemble import Experiment, simulation


def carried(experiment: Experiment, device: Device, candidate: DeviceModel, number: int) -> Carried:
    """By the question with which it is judged after this round, for that decides the batches of its examples. Right
    here: neither workers nor a convoy know this task."""
    found: list[Carried] = []

    def look(client: Client, inbox: Parcel) -> Outcome:
        model, weights = candidate.carried(client, inbox)
        filled = own_statistics(replace(client, model=model), weights)
        found.append((model, {name: one[0].detach().clone() for name, one in filled.items()}))
        return Outcome(send={})

    judge = experiment.judge
    schedule = Schedule(judge.statistics.batch_size)
    task = replace(judge.personal(candidate).measure, run=look, sends={}, same=None, schedule=schedule)
    errand = Errand(simulation(experiment), task, {device: candidate.inbox(device)}, number)
    for work in works([errand]):
        carry_out(work)
    return found[0]
