"""Which test examples a run's models get right, in its folder."""

import json

import numpy as np
import pytest
import torch

import fedloom
from fedloom.runs.correct_examples import CORRECT_FILE, describe_correct, read_correct


def final_accuracies(done):
    return {(f.candidate, f.tier): f.value for f in done.final if (f.test, f.metric) == ("global", "accuracy")}


def as_percent(known):
    return {model: 100 * float(np.mean(flags)) for model, flags in known.by_model.items()}


def test_correct_examples_are_those_of_the_last_accuracy(run):
    done = run(rounds=2, evaluation={"every": 1})
    known = read_correct(done.folder)
    assert known.round == 2
    assert known.data == json.loads((done.folder / "manifest.json").read_text())["data"]
    assert as_percent(known) == pytest.approx(final_accuracies(done))
    assert {len(flags) for flags in known.by_model.values()} == {360}


def test_correct_examples_of_a_prolonged_run_are_those_of_its_last_round(run):
    done = run(rounds=1)
    first = read_correct(done.folder)
    prolonged = fedloom.resume(done.folder, rounds=2)
    known = read_correct(done.folder)
    assert (first.round, known.round) == (1, 2)
    assert as_percent(known) == pytest.approx(final_accuracies(prolonged))


@pytest.mark.parametrize("changes", [{"evaluation": {"tests": ["local"]}}, {"method": {"name": "standalone"}}])
def test_correct_examples_without_one_model_for_the_whole_test_set_are_unknown(run, changes):
    done = run(rounds=1, **changes)
    assert not (done.folder / CORRECT_FILE).exists()
    assert read_correct(done.folder) is None


@pytest.mark.parametrize("examples", [1, 7, 8, 9, 1000])
def test_correct_examples_packed_are_read_as_written(tmp_path, examples):
    flags = torch.rand(examples, generator=torch.Generator().manual_seed(examples)) < 0.5
    (tmp_path / "manifest.json").write_text(json.dumps({"data": "abc"}))
    (tmp_path / CORRECT_FILE).write_text(json.dumps(describe_correct(3, {("server", "small"): flags})))
    known = read_correct(tmp_path)
    assert (known.round, known.data) == (3, "abc")
    assert known.by_model["server", "small"].tolist() == flags.tolist()
