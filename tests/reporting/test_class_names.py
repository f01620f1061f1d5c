"""A report shows the names of classes; rows and CSV files keep their numbers."""

import csv
import json

import numpy as np
import pytest

import fedloom as fl
from fedloom.data import as_dataset

NAMES = ["sitting down", "standing still", "walking upstairs", "walking downstairs"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    draw = np.random.default_rng(0)
    y = np.arange(80) % 4
    x = draw.normal(size=(80, 6)).astype(np.float32) + y[:, None]
    sim = fl.Simulation(
        as_dataset((x, y), class_names=NAMES, name="steps"),
        devices=4,
        tiers=fl.tiers(fl.models.mlp, {"hidden": [6]}, all={"share": 1.0}),
        method="fedavg",
    )
    list(sim.rounds(1, metrics=["recall"]))
    return sim.save(tmp_path_factory.mktemp("named") / "run")


def test_report_names_classes_in_facts_and_charts(run):
    page = run.report().read_text("utf-8")
    assert f"4 classes: {', '.join(NAMES)}" in page
    assert page.count("walking upstairs") >= 3  # the facts, the partition and the entries


def test_report_rows_and_tables_of_entries_keep_numbers(run):
    run.report()
    (file,) = (run.folder / "figures").glob("entries_recall*.csv")
    with file.open() as content:
        assert [line["entry"] for line in csv.DictReader(content)] == ["0", "1", "2", "3"]
    names = {json.loads(line)["metric"] for line in (run.folder / "rows.jsonl").read_text().splitlines()}
    assert {f"recall[{number}]" for number in range(4)} <= names
