"""Record a run in its folder while it runs: the fleet, rows, events and checkpoints, and at the end its models."""

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ..data import IGNORED
from ..engines import InProcess, Refusal
from ..evaluation import Row
from ..evaluation.metrics import MetricInfo, unigram_perplexity
from ..fleet import Fleet
from ..fleet.tiers import tier_regions
from ..models import compute_cost
from ..placement import hardware_name
from ..recipe.load import dumps
from ..tensors import Parcel, fingerprint
from .checkpoint import FOLDER, Checkpoint, CheckpointPolicy, Checkpoints
from .correct_examples import CORRECT_FILE, describe_correct
from .experiment import Experiment
from .final_models import CKA_FILE, compute_tier_cka, save_models
from .folder import FLEET_FILE, RunWriter, peak_memory, read_rows
from .holdings import count_targets
from .lock import lock_run
from .loop import RoundResult, evaluate_if_due, rounds, single_thread
from .own_names import describe_names, list_own_names
from .trackers import NONE, Trackers, headline_first


class NothingAdmitted(Exception):  # noqa: N818 - named for what is wrong
    """No reply of any device was admitted, so nothing was learned; the run fails instead of reporting its start."""

    def __init__(self, first: Refusal, folder: Path):
        whose = f"device {first.device}: " if first.device else ""
        super().__init__(f"no reply was ever admitted; {whose}{first.code}: {first.reason}")
        self.hint = f"every refusal is in {folder / 'events.jsonl'}"


def record_rounds(
    experiment: Experiment, folder: Path, since: Checkpoint | None = None, trackers: Trackers = NONE
) -> Generator[RoundResult, None, None]:
    """Run the rounds of an experiment; each is written to the run's folder before it is yielded.

    `since` resumes the run in an existing folder from that checkpoint; one of round 0 starts it again.
    """
    recipe = experiment.loaded.recipe.document()
    writer = RunWriter(folder)
    policy = CheckpointPolicy(Checkpoints(folder / FOLDER), checkpoint_interval(experiment), writer.sync)
    recorder = Recorder(experiment, writer, policy)
    with (
        single_thread(),
        closing(experiment.engine),
        recorder.opened(since),
        writer.record_failure(),
        trackers.follow(folder, recipe, since is not None, experiment.headline_test),
        recorder.save_on_exit(),
    ):
        if since is not None and was_last_round(since) and since.number < experiment.loaded.recipe.rounds:
            recorder.evaluate_again(last=False)
        for result in rounds(experiment, since):
            recorder.add(result)
            trackers.rows(headline_first(result.rows, result.test))
            yield result
        recorder.close()


def finish_early(experiment: Experiment, folder: Path, since: Checkpoint) -> None:
    """Take an interrupted run as it is after its last checkpoint, as if its recipe had asked for that many rounds.

    The experiment's recipe must have as many rounds as the checkpoint. What only a last round has is made up for: the
    evaluation of single devices, the method's last exchange, models and fingerprints.
    """
    writer = RunWriter(folder)
    policy = CheckpointPolicy(Checkpoints(folder / FOLDER), checkpoint_interval(experiment), writer.sync)
    recorder = Recorder(experiment, writer, policy)
    with single_thread(), closing(experiment.engine), recorder.opened(since), writer.record_failure():
        if since.number == experiment.loaded.recipe.rounds:
            recorder.evaluate_again(last=True)
        for result in rounds(experiment, since):
            recorder.add(result)
        recorder.close()


def was_last_round(since: Checkpoint) -> bool:
    """True if the recipe of a checkpoint had no more rounds."""
    return bool(since.number) and since.number >= since.about["recipe"]["rounds"]


def checkpoint_interval(experiment: Experiment) -> int | Literal["auto"]:
    """1 if devices store their own state: they drop states that are older than the last counted round."""
    return experiment.loaded.recipe.checkpoints.every if experiment.client_states.is_local else 1


@dataclass
class Recorder:
    experiment: Experiment
    writer: RunWriter
    policy: CheckpointPolicy
    started: float = 0.0
    server: Parcel = field(default_factory=dict)
    last: int = 0  # finished round
    replied: int = 0
    seen: int = 0  # refusals
    commits: int = 0  # of client states
    saving: float = 0.0  # seconds reported so far

    def __post_init__(self) -> None:
        self.started = self._clock()

    def _clock(self) -> float:
        """Seconds of this run alone, also if others run side by side."""
        return self.experiment.simulator.executor.clock()

    @contextmanager
    def opened(self, since: Checkpoint | None) -> Iterator[None]:
        """Create or reopen the run's folder, and hold it: no other process writes to it meanwhile."""
        if since is None:
            self.open(None)
        with lock_run(self.writer.folder):
            if since is not None:
                self.open(since)
            yield

    def open(self, since: Checkpoint | None) -> None:
        if since is None:
            self.writer.open(self._recipe_text(), build_manifest(self.experiment))
        self.experiment.partition.save(self.writer.folder / "partition.json")
        self.writer.write_document(FLEET_FILE, summarize_fleet(self.experiment))
        if since is None:
            return
        self.policy.checkpoints.delete_after(since.number)
        self.writer.reopen(since.about.get("sizes", {}), self._recipe_text())
        names = describe_names(self.experiment.loaded.recipe, self.experiment.registries)
        self.writer.update(**describe_metrics(self.experiment), **names)
        restore_experiment(self.experiment, since)
        self.server, self.last, self.replied = since.server, since.number, since.about.get("replied", 0)
        self.started -= since.about.get("seconds", 0.0)

    def _recipe_text(self) -> str:
        return dumps(self.experiment.loaded.recipe.document())

    def evaluate_again(self, *, last: bool) -> None:
        """Evaluate the restored state as after a last round, or as after any other, and replace its round's rows."""
        figures = [row for row in read_rows(self.writer.folder) if row.round == self.last and not row.candidate]
        rows = evaluate_if_due(self.experiment, self.server, self.last, last)
        self.writer.replace_rows(self.last, [*rows, *figures])
        if last:
            self._write_correct(self.last)
        # the checkpoint on disk has a recipe with another number of rounds
        self.policy.replace(self._checkpoint(self.last), self._score(tuple(rows)))

    def add(self, result: RoundResult) -> None:
        self.writer.write_rows(result.rows)
        new, self.seen = self.experiment.refusals[self.seen :], len(self.experiment.refusals)
        in_order = sorted(new, key=lambda event: (event[0], event[1].device, event[1].code))  # not by arrival
        self.writer.write_events({"round": number, **asdict(refusal)} for number, refusal in in_order)
        self.writer.write_participation(result.participation)
        self.writer.write_timings([self._timing(result)])
        if result.number >= result.of:
            self._write_correct(result.number)
        self.replied += result.traffic.replied
        self.server, self.last = result.server, result.number
        self.policy.after(self._checkpoint(result.number), self._score(result.rows))
        self.commits = self.experiment.client_states.commits  # last: an interruption before it must not save

    def _write_correct(self, number: int) -> None:
        correct = self.experiment.evaluator.correct
        if correct:
            self.writer.write_document(CORRECT_FILE, describe_correct(number, correct))

    def _checkpoint(self, number: int) -> Checkpoint:
        states = self.experiment.client_states
        about = {
            "replied": self.replied, "seconds": self._seconds(), "sizes": self.writer.sizes(),
            "state": self.experiment.state.as_json(), **self._inputs,
        }  # fmt: skip
        return Checkpoint(number, self.server, states.committed, about, states.versions)

    def _score(self, rows: tuple[Row, ...]) -> float | None:
        return checkpoint_score(rows, self.experiment.evaluator.declared_metrics)

    def _timing(self, result: RoundResult) -> dict[str, Any]:
        """What depends on the machine, and so is no row. Saving counts the checkpoints since the round before."""
        saving, self.saving = self.policy.spent - self.saving, self.policy.spent
        took = {"seconds": result.seconds, "evaluation_seconds": result.evaluation_seconds, "saving_seconds": saving}
        rounded = {name: round(seconds, 4) for name, seconds in took.items()}
        return {"round": result.number, **rounded, "peak_memory": peak_memory()}

    @cached_property
    def _inputs(self) -> dict[str, Any]:
        """A run is only resumed with the same inputs."""
        return collect_inputs(self.experiment)

    def _seconds(self) -> float:
        return round(self._clock() - self.started, 3)

    @contextmanager
    def save_on_exit(self) -> Iterator[None]:
        """An interruption loses only the round in progress."""
        try:
            yield
        except BaseException:
            if self.experiment.client_states.commits == self.commits:  # else client states are ahead of the server
                self.policy.save()
            raise

    def close(self) -> None:
        experiment = self.experiment
        if not self.replied and experiment.refusals:
            refusals = [refusal for _, refusal in experiment.refusals]
            first = next((refusal for refusal in refusals if refusal.device), refusals[0])
            raise NothingAdmitted(first, self.writer.folder)
        self.policy.save()
        save_models(experiment, self.server, self.last, self.writer)
        cka = compute_tier_cka(experiment, self.server, self.last, self.writer.folder)
        self.writer.write_document(CKA_FILE, cka)
        spent = {"seconds": self._seconds(), "checkpoint_seconds": round(self.policy.spent, 3)}
        hardware = {"compute": describe_compute(experiment.simulator, hardware=True)}
        self.writer.update(status="finished", **spent, **hardware, **compute_fingerprints(experiment, self.server))


def restore_experiment(experiment: Experiment, since: Checkpoint) -> None:
    """Restore client states and run state from a checkpoint; the server state is passed to the rounds."""
    experiment.client_states.committed = since.client_states
    experiment.state.restore(since.about.get("state", {}))


def compute_fingerprints(experiment: Experiment, server: Parcel) -> dict[str, str]:
    """Of the server state, and of all client states (of their versions where devices store them)."""
    states = experiment.client_states.committed
    bundles = {f"{device} {name}": tensors for device in sorted(states) for name, tensors in states[device].items()}
    return {"sha256": fingerprint(server), "devices_sha256": fingerprint(bundles)}


def checkpoint_score(rows: tuple[Row, ...], declared: Mapping[str, MetricInfo]) -> float | None:
    """Mean of a round's models over tiers and tests: decides which checkpoint is the best.

    Of the task's headline or of accuracy; without them, of the first metric that says which direction is better. Its
    sign is changed if lower is better.
    """
    directed = {
        name: 1 if info.higher_is_better else -1 for name, info in declared.items() if info.higher_is_better is not None
    }
    headlines = [name for name, info in declared.items() if info.headline]
    name = next(name for name in (*headlines, "accuracy", *directed, "") if name in directed or not name)
    values = [row.value for row in rows if row.metric.partition("[")[0] == name and not row.device]
    return directed[name] * (sum(values) / len(values)) if values else None


def collect_inputs(experiment: Experiment) -> dict[str, Any]:
    """Everything that decides a run's result, as JSON."""
    document = json.loads(json.dumps(experiment.loaded.recipe.document()))
    return {
        "recipe": document,
        "data": experiment.dataset.fingerprint(),
        "partition": experiment.partition.fingerprint(),
        **hash_frozen_weights(experiment),
    }


def hash_frozen_weights(experiment: Experiment) -> dict[str, dict[str, str]]:
    """The sha256 of each tier's frozen weights, which are in no checkpoint; empty if nothing is frozen."""
    hashes = {tier.name: tier.model.frozen_sha256() for tier in experiment.fleet.active_tiers}
    return {"frozen": hashes} if any(hashes.values()) else {}


def find_kernels(fleet: Fleet) -> dict[str, str]:
    """What trains each tier's model: "lanes" or "torch"."""
    return {tier.name: "lanes" if tier.model.trains_interleaved() else "torch" for tier in fleet.active_tiers}


def build_manifest(experiment: Experiment) -> Mapping[str, Any]:
    return {
        "seed": experiment.loaded.recipe.seed,
        "started": utc_now(),
        "data": experiment.dataset.fingerprint(),
        "partition": experiment.partition.fingerprint(),
        **hash_frozen_weights(experiment),
        "compute": describe_compute(experiment.simulator),
        "kernels": find_kernels(experiment.fleet),
        "test_examples": len(experiment.dataset.test),
        **({"data_deviation": experiment.dataset.deviation} if experiment.dataset.deviation else {}),
        **describe_metrics(experiment),
        **describe_names(experiment.loaded.recipe, experiment.registries),
        **_unigram_baseline(experiment),
    }


def describe_compute(engine: InProcess, hardware: bool = False) -> dict[str, Any]:
    """Where and how blocks were computed, and which were too large for memory: tier and task -> devices at a time.

    With `hardware` also what its maker calls it: to ask initializes the device, after which no worker can be forked.
    """
    compute = engine.compute
    limits = {f"{tier} {task}": count for (tier, task), count in sorted(engine.noted_limits.items())}
    return {
        **asdict(compute),
        "devices": list(compute.devices),
        **({"hardware": hardware_name(compute.torch_device)} if hardware else {}),
        **({"devices_at_a_time": limits} if limits else {}),
    }


def describe_metrics(experiment: Experiment) -> dict[str, Any]:
    """Direction and unit of each metric, and which one is the headline if that does not follow from the metrics."""
    declared = {name: asdict(info) for name, info in experiment.evaluator.declared_metrics.items()}
    plain = {name: {key: value for key, value in info.items() if key != "headline"} for name, info in declared.items()}
    return {"metrics": {name: info if info["headline"] else plain[name] for name, info in declared.items()}}


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _unigram_baseline(experiment: Experiment) -> Mapping[str, float]:
    """For masked text: the perplexity of guessing hidden words by their frequency alone."""
    dataset, hidden = experiment.dataset, experiment.evaluator.sequence.masked()
    if hidden is None or not dataset.task.is_sequence or not bool(hidden.any()):
        return {}
    known, targets = dataset.train.y[dataset.train.y != IGNORED], dataset.test.y[hidden]
    targets = targets[targets != IGNORED]
    return {"unigram_perplexity_hidden": unigram_perplexity(known, targets, dataset.classes)}


def summarize_fleet(experiment: Experiment) -> dict[str, Any]:
    """The fleet, its models and its data, for reports that have no access to the data."""
    recipe, fleet, method = experiment.loaded.recipe, experiment.fleet, experiment.method
    fixed = fleet.assignment == "fixed"
    return {
        "method": {
            "name": recipe.method.name, "paper": method.info.paper, "uploads": method.info.uploads,
            "client_state": method.info.client_state, "shares_features": method.shares_features,
            "produces": method.produces,
        },
        "dataset": experiment.dataset.name,
        **({"class_names": list(experiment.dataset.class_names)} if experiment.dataset.class_names else {}),
        "tiers": _summarize_tiers(experiment),
        "regions": [list(region) for region in tier_regions(fleet)],
        "devices": [fleet.name(index) for index in range(fleet.size)],
        "device_tiers": [device.tier for device in fleet.devices(1)] if fixed else None,
        "unseen": [fleet.name(index) for index in sorted(fleet.holdout_devices)],
        "holdings": count_targets(experiment.dataset, experiment.partition),
        "own_names": _flat_own_names(experiment),
    }  # fmt: skip


def _summarize_tiers(experiment: Experiment) -> list[dict[str, Any]]:
    fleet = experiment.fleet
    trained = {tier.name for tier in fleet.active_tiers}
    tiers = []
    for tier, share in zip(fleet.tiers, fleet.shares, strict=True):
        cost = compute_cost(tier.model)
        size = {"parameters": cost.parameters, "macs": cost.macs}
        size |= {"trained_parameters": cost.trained_parameters} if cost.frozen_parameters else {}
        tiers.append({"name": tier.name, "share": share, **size, "trained": tier.name in trained})
    return tiers


def _flat_own_names(experiment: Experiment) -> list[str]:
    own = list_own_names(experiment.loaded.recipe, experiment.registries)
    return [name for names in own.values() for name in names]
