"""Export of text models, models of time series, user-defined families and personal models."""

import importlib
import json
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import fedloom
from fedloom.data import Dataset, Examples, Preparation, as_dataset
from fedloom.recipe.errors import RecipeError
from fedloom.recipe.registries import Registries

WORDS = 6


def rows_of_words(positions: bool) -> Dataset:
    """Rows of five words; the label is every word, a fifth of them masked, or the first word."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, WORDS, (60, 5), generator=draw)
    y = x.clone() if positions else x[:, 0].clone()
    tests = x[40:].masked_fill(torch.rand(20, 5, generator=draw) < 0.2, WORDS) if positions else x[40:]
    preparation = Preparation(mask_chance=0.2, mask_token=WORDS) if positions else Preparation()
    words = (*(f"word{number}" for number in range(WORDS)), "<mask>")
    parts = Examples(x[:40], y[:40]), Examples(tests, y[40:])
    return Dataset("rows", *parts, WORDS, preparation, WORDS + 1, vocabulary=words)


TEXT: dict[str, tuple[bool, dict[str, Any]]] = {
    "transformer": (True, {"embedding": 4, "heads": 2, "hidden": 6, "layers": 2, "exit_after": 1}),
    "lstm": (False, {"embedding": 5, "hidden": 4, "features": 6}),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(TEXT))
def test_export_text_model_measures_the_evaluators_metrics(family, document, tmp_path):
    positions, settings = TEXT[family]
    datasets = {"rows": partial(rows_of_words, positions)}
    recipe = document(
        data={"dataset": "rows", "devices": 4}, model={"family": family, **settings}, training={"batch_size": 5}
    )
    run = fedloom.run(recipe, registries=Registries().with_names(datasets=datasets), out=tmp_path / "run")
    card = run.export("pt2", "small", out=tmp_path / "out").card
    evaluated = card["evaluated"]["tests"]["global"]
    assert ("perplexity_hidden" in evaluated) == positions
    for metric, value in evaluated.items():
        assert card["measured"]["global"][metric] == pytest.approx(value, rel=1e-4), metric
    assert (card["input"]["dtype"], card["input"]["shape"], card["input"]["tokens"]) == ("int64", [5], WORDS + 1)
    assert card["output"]["shape"] == ([5, WORDS] if positions else [WORDS])
    assert (tmp_path / "out/vocabulary.txt").read_text("utf-8").splitlines()[-1] == "<mask>"


SERIES = np.random.default_rng(0).normal(5, 3, (60, 3, 8)).astype(np.float32)
ACTIVITIES = ["sit", "walk", "run"]


def series(normalize: bool) -> Dataset:
    """Normalized by the preparation, or by the reader itself."""
    x = SERIES if normalize else (SERIES - 5) / 3
    return as_dataset((x, np.arange(60) % 3), kind="series", class_names=ACTIVITIES, normalize=normalize)


@pytest.mark.parametrize("to", ["safetensors", pytest.param("onnx", marks=pytest.mark.slow)])
def test_export_series_contains_their_normalization_and_class_names(document, tmp_path, to):
    if to == "onnx":
        pytest.importorskip("onnx")
    recipe = document(data={"dataset": "series", "devices": 4}, model={"family": "convnet1d", "hidden": [4, 4]})
    names = Registries().with_names(datasets={"series": partial(series, True)})
    run = fedloom.run(recipe, registries=names, out=tmp_path / "run")
    exported = run.export(to, "small", out=tmp_path / "out")
    card, data = exported.card, series(True)
    assert card["input"]["meaning"] == "Examples as the data set gives them; normalization is inside the file."
    assert (card["input"]["dtype"], card["input"]["shape"]) == ("float32", [3, 8])
    assert len(card["input"]["preparation"]["mean"]) == 3 and card["output"]["labels"] == ACTIVITIES
    assert "classes from 0 on: sit, walk, run" in (exported.folder / "card.md").read_text("utf-8")
    assert card["measured"]["global"]["accuracy"] == pytest.approx(card["evaluated"]["tests"]["global"]["accuracy"])
    if to == "onnx":
        metadata = importlib.import_module("onnx").load(exported.file).metadata_props
        assert [(one.key, json.loads(one.value)) for one in metadata] == [("class_names", ACTIVITIES)]
        return
    module = fedloom.load_model(exported.folder, registries=names)
    plain = run.export("safetensors", "small", out=tmp_path / "plain", input_kind="prepared")
    bare = fedloom.load_model(plain.folder, registries=names)
    assert torch.allclose(module(data.test.x), bare(data.preparation(data.test.x)), atol=1e-5)
    assert not torch.allclose(module(data.test.x), bare(data.test.x), atol=1e-2)
    assert plain.card["input"]["meaning"].startswith("Examples prepared by the caller: {'mean'")
    with safe_open(exported.file, "pt") as file:
        assert json.loads(json.loads(file.metadata()["about"])["class_names"]) == ACTIVITIES


def test_export_card_does_not_claim_what_the_reader_did(document, tmp_path):
    recipe = document(data={"dataset": "series", "devices": 4}, model={"family": "convnet1d", "hidden": [4, 4]})
    names = Registries().with_names(datasets={"series": partial(series, False)})
    run = fedloom.run(recipe, registries=names, out=tmp_path / "run")
    meaning = run.export("safetensors", "small", out=tmp_path / "out").card["input"]["meaning"]
    assert "Nothing is prepared inside the file" in meaning and "must be done before" in meaning


class Own(nn.Module):
    def __init__(self, classes: int, width: float) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, int(8 * width)), nn.Linear(int(8 * width), classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.flatten(1)).relu())


def own(*, classes: int, width: float = 1.0) -> nn.Module:
    return Own(classes, width)


def test_export_user_family_is_loaded_by_name(document, tmp_path):
    registries = Registries().with_names(models={"own": own})
    run = fedloom.run(document(model={"family": "own"}), registries=registries, out=tmp_path / "run")
    exported, x = run.export("safetensors", "small", out=tmp_path / "out"), torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    again = fedloom.load_model(exported.folder, registries=registries)
    assert torch.equal(again(x), run.model("small")(x))
    with pytest.raises(RecipeError, match="MODEL_NAME"):
        fedloom.load_model(exported.folder)


PERSONAL: dict[str, dict[str, Any]] = {
    "ditto": {},
    "fedrep": {},
    "lgfedavg": {},
    "fedhenn": {"probe_size": 8},
    "mixed": {
        "parts": [{"tiers": ["large"], "method": "heterofl"}, {"tiers": ["small"], "method": "standalone"}],
    },
}


@pytest.mark.parametrize("name", sorted(PERSONAL))
def test_export_personal_model_matches_recorded_accuracy(name, document, run):
    changes: dict[str, Any] = {"method": {"name": name, **PERSONAL[name]}, "data__max_examples": 50}
    if name == "ditto":
        changes["tiers"] = [{"name": "large", "share": 1.0}]
    if name in ("fedhenn", "mixed"):
        changes["data__public"] = {"examples": 16}
    finished = run("run", **changes)
    card = finished.export("safetensors", device="3").card
    evaluated, measured = card["evaluated"]["tests"], card["measured"]
    assert evaluated["local"]["accuracy"] == pytest.approx(measured["local"]["accuracy"])
    assert evaluated["global"]["accuracy"] == pytest.approx(measured["global"]["accuracy"])
    assert card["parity"]["difference"] <= card["parity"]["bound"]


def test_model_changed_data_is_refused(document, run, tmp_path):
    finished = run("run")
    manifest = finished.folder / "manifest.json"
    manifest.write_text(manifest.read_text("utf-8").replace('"data": "', '"data": "x'), encoding="utf-8")
    with pytest.raises(RecipeError, match="RUN_DATA"):
        finished.model("small")
