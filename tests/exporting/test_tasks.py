"""Exported models of other tasks: what a file predicts and what its card says."""

import pytest
import torch

from fedloom.data import TASKS
from fedloom.evaluation.metrics import default_metrics, predicted_values
from fedloom.evaluation.pixels import sum_pixels
from fedloom.exporting import as_predictor, check_parity, evaluate_predictor
from fedloom.exporting.card import OUTPUT_MEANINGS
from fedloom.testing import TinyWorld


@pytest.mark.parametrize("task", ["multi_label", "regression", "segmentation"])
def test_evaluate_predictor_takes_outputs_as_the_module_returns_them(task: str) -> None:
    world = TinyWorld.make("unet" if task == "segmentation" else "mlp", task=task)
    model, dataset = world.fleet.global_model, world.dataset
    weights, module = model.initial_weights(0), model.module().eval()
    module.load_state_dict(weights, strict=False)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return list(module(x).exits.values())[-1]

    x = dataset.preparation(dataset.test.x)
    assert check_parity(plain, x, as_predictor(model, weights), x).is_within_bound
    with torch.no_grad():
        outputs = plain(x).movedim(dataset.task.class_axis, -1)
    predictions = sum_pixels(outputs, dataset.test.y) if task == "segmentation" else outputs
    expected = {
        name: value
        for metric in default_metrics(dataset.task)
        for name, value in predicted_values(metric, predictions, dataset.test.y).items()
    }
    found = evaluate_predictor(plain, dataset, dataset.preparation, 3)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_card_has_a_sentence_on_the_outputs_of_every_task(task: str) -> None:
    assert OUTPUT_MEANINGS[TASKS[task].family].endswith(".")
