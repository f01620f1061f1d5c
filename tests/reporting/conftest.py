"""Folders of small runs, created once for all tests that only read them."""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom
from fedloom.cli.app import main
from fedloom.data import Dataset, Examples, Preparation
from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries
from fedloom.reporting.page import Page, build_page
from fedloom.reporting.report_data import ReportData, read_report_data
from fedloom.studies.compare import plan_comparison

TIERS = [
    {"name": "large", "share": 0.5, "width": 1.0, "speed": 1e6, "bandwidth": 1e4},
    {"name": "small", "share": 0.5, "width": 0.5, "speed": 2e5, "bandwidth": 1e4},
]


def recipe(**changes: Any) -> dict[str, Any]:
    """Devices with half of the labels each, two tiers with simulated speed."""
    return {
        "seed": 0, "rounds": 4, "tiers": TIERS, "method": {"name": "heterofl"},
        "data": {
            "dataset": "digits", "devices": 8, "max_examples": 30, "test_examples": 100,
            "partition": {"kind": "label_shards", "labels_per_device": 5},
        },
        "fleet": {"participation": 0.75}, "model": {"family": "convnet", "hidden": [4, 8]},
        "training": {"batch_size": 10, "epochs": 2, "optimizer": {"kind": "sgd", "lr": 0.3}}, **changes,
    }  # fmt: skip


def quietly(*arguments: object) -> None:
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        pytest.raises(SystemExit),
    ):
        main([str(argument) for argument in arguments])


@pytest.fixture(scope="package")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything that a report can show."""
    folder = tmp_path_factory.mktemp("one") / "run"
    document = recipe(
        evaluation={"fine_tune": {"part": "head", "epochs": 1, "batch_size": 10, "lr": 0.1}},
        faults={"dropout": 0.3, "corrupt": {"devices": 1, "how": "nan"}},
    )
    fedloom.run(document, out=folder)
    quietly("subnet", folder, "--count", 5, "--examples", 40, "--workers", 1, "--quiet")
    return folder


@pytest.fixture(scope="package")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HeteroFL compared with three arms over two seeds."""
    home = tmp_path_factory.mktemp("several") / "home"
    document = {
        **recipe(rounds=3),
        "compare": {"arms": {"fjord": ["method={name='fjord'}"]}, "baseline": "fjord", "margin": 0.0},
    }
    planned = plan_comparison(
        load(document, Registries()), Registries(), 2, ["standalone", "drop-the-small"], home, home
    )
    list(planned.rounds())
    planned.result()
    return home


@pytest.fixture(scope="package")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A masked language model."""

    def words() -> Dataset:
        draw = torch.Generator().manual_seed(0)
        parts = [torch.randint(0, 6, (count, 5), generator=draw) for count in (40, 20)]
        hiding = Preparation(mask_chance=0.3, mask_token=6)
        return Dataset("words", *(Examples(one, one) for one in parts), 6, hiding, 7)

    folder = tmp_path_factory.mktemp("text") / "run"
    sizes: dict[str, Any] = {"embedding": 4, "heads": 2, "hidden": 6, "layers": 1, "dropout": 0.0}
    document = recipe(
        rounds=3, data={"dataset": "words", "devices": 4, "partition": {"kind": "iid"}},
        model={"family": "transformer", **sizes}, evaluation={"tests": ["global"]},
    )  # fmt: skip
    fedloom.run(document, out=folder, registries=Registries().with_names(datasets={"words": words}))
    return folder


@pytest.fixture(scope="package")
def report(run: Path) -> ReportData:
    return read_report_data([run])


@pytest.fixture(scope="package")
def several(compared: Path) -> ReportData:
    return read_report_data([compared])


@pytest.fixture(scope="package")
def pages(report: ReportData, several: ReportData, text: Path) -> dict[str, Page]:
    return {"run": build_page(report), "comparison": build_page(several), "text": build_page(read_report_data([text]))}


@pytest.fixture(scope="session")
def tiny() -> Callable[..., dict[str, Any]]:
    return recipe
