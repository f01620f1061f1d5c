"""A recipe's task: inferred from the data, refused where it contradicts them or where something does not fit it."""

from typing import Any

import pytest
import torch

import fedloom as fl
from fedloom.data import DATASETS, TASKS, Examples, LearningTask
from fedloom.recipe.errors import RecipeError
from fedloom.recipe.load import load
from fedloom.recipe.paths import resolve_data_folder
from fedloom.recipe.registries import Registries
from fedloom.runs.build import assemble, build
from fedloom.runs.data import build_partition, read_data_spec
from fedloom.runs.recorder import checkpoint_score, describe_metrics, summarize_fleet

FOLDER = resolve_data_folder(None)
MODELS = {
    "diabetes": {"family": "mlp", "hidden": [8]},
    "digits": {"family": "mlp", "hidden": [8]},
    "digits-multilabel": {"family": "mlp", "hidden": [8]},
    "digits-segmentation": {"family": "unet", "hidden": [4, 6]},
    "wikitext2": {"family": "transformer", "embedding": 8, "hidden": 8, "layers": 1, "heads": 2},
}


def document(dataset: str, **sections: Any) -> dict[str, Any]:
    return {
        "rounds": 1,
        "data": {"dataset": dataset, "devices": 4},
        "model": MODELS[dataset],
        "tiers": [{"name": "large", "share": 0.5}, {"name": "small", "share": 0.5, "width": 0.5}],
        "method": {"name": "heterofl"},
        **sections,
    }


def check(recipe: dict[str, Any]) -> Any:
    """What `fedloom check` does."""
    loaded, registries = load(recipe, Registries()), Registries()
    spec = read_data_spec(loaded, registries, FOLDER)
    build_partition(loaded, registries, spec.labels)
    return build(loaded, registries, spec)


def refusal(recipe: dict[str, Any]) -> tuple[str, str, str]:
    with pytest.raises(RecipeError) as caught:
        check(recipe)
    (issue,) = caught.value.issues
    return issue.code, issue.message, issue.hint


@pytest.mark.parametrize("dataset", ["diabetes", "digits", "digits-multilabel", "digits-segmentation", "wikitext2"])
def test_check_recipe_without_task_takes_the_data_sets_own(dataset: str) -> None:
    check(document(dataset))


@pytest.mark.parametrize(
    ("dataset", "task", "own"),
    [
        ("diabetes", "classification", "regression"),
        ("digits", "regression", "classification"),  # without reading it
        ("digits-segmentation", "multi_label", "segmentation"),
        ("wikitext2", "classification", "masked_language_modeling"),
    ],
)
def test_check_task_that_contradicts_the_data_is_refused_with_a_hint(dataset: str, task: str, own: str) -> None:
    code, message, hint = refusal(document(dataset, task={"kind": task}))
    assert code == "TASK_DATA" and f"not for {task}" in message and f'"{own}"' in hint


def test_check_unknown_task_is_refused_with_a_suggestion() -> None:
    with pytest.raises(RecipeError) as caught:
        load(document("diabetes", task={"kind": "regresion"}), Registries())
    assert "did you mean 'regression'?" in str(caught.value)


@pytest.mark.parametrize(
    ("dataset", "loss"),
    [("diabetes", "cross_entropy"), ("digits", "mse"), ("digits-multilabel", "focal"), ("digits-segmentation", "mae")],
)
def test_check_loss_of_other_targets_is_refused(dataset: str, loss: str) -> None:
    code, message, hint = refusal(document(dataset, training={"loss": {"kind": loss}}))
    assert code == "LOSS_TASK" and loss in message and "known for it" in hint


@pytest.mark.parametrize(
    ("dataset", "metric", "known"),
    [("diabetes", "accuracy", "rmse"), ("digits-multilabel", "rmse", "exact_match"), ("digits", "mae", "accuracy"),
     ("digits-segmentation", "auroc", "mean_iou"), ("digits", "exact_match", "accuracy")],
)  # fmt: skip
def test_check_metric_of_another_task_is_refused(dataset: str, metric: str, known: str) -> None:
    code, message, hint = refusal(document(dataset, evaluation={"metrics": [metric]}))
    assert code == "METRIC_TASK" and metric in message and known in hint


def test_check_model_that_does_not_predict_pixels_is_refused() -> None:
    code, message, _ = refusal(document("digits-segmentation", model={"family": "mlp", "hidden": [8]}))
    assert code == "MODEL_BUILD" and "must return [batch, 11, 16, 16] for these targets" in message


def test_check_preparation_that_moves_pixels_is_refused() -> None:
    data = {"dataset": "digits-segmentation", "devices": 4, "preparation": "cifar100"}
    code, message, _ = refusal(document("digits-segmentation", data=data))
    assert code == "TASK_PREPARATION" and "labels of their pixels would not follow" in message


def test_check_partition_by_label_is_refused_for_numbers() -> None:
    data = {"dataset": "diabetes", "devices": 4, "partition": {"kind": "dirichlet", "alpha": 0.5}}
    code, message, _ = refusal(document("diabetes", data=data))
    assert code == "RECIPE_VALUE" and 'use "iid" or "quantity"' in message


@pytest.mark.parametrize("dataset", ["diabetes", "digits-multilabel", "digits-segmentation"])
def test_check_fedgkt_is_refused_with_the_reason(dataset: str) -> None:
    code, message, _ = refusal(document(dataset, method={"name": "fedgkt"}))
    assert code == "METHOD_REFUSES" and "fedgkt needs one class label for every example" in message


def test_check_heterofl_label_settings_are_refused_only_if_named() -> None:
    code, message, _ = refusal(document("diabetes", method={"name": "heterofl", "mask_unseen_labels": True}))
    assert code == "METHOD_REFUSES" and "method.mask_unseen_labels" in message
    check(document("diabetes", method={"name": "heterofl", "mask_unseen_labels": False}))


def test_compared_metric_is_checked_against_those_of_the_task() -> None:
    check(document("diabetes", compare={"metric": "r2"}))
    code, _, hint = refusal(document("diabetes", compare={"metric": "accuracy"}))
    assert code == "RECIPE_NAME" and "rmse" in hint


@pytest.mark.parametrize("dataset", ["diabetes", "digits-multilabel", "digits-segmentation"])
def test_manifest_names_the_headline_and_its_direction(dataset: str) -> None:
    experiment = assemble(load(document(dataset), Registries()), Registries(), FOLDER)
    metrics, task = describe_metrics(experiment)["metrics"], experiment.dataset.task
    assert [name for name, info in metrics.items() if info.get("headline")] == [task.headline]
    assert metrics[task.headline]["higher_is_better"] is (dataset != "diabetes")
    held = summarize_fleet(experiment)["holdings"]
    assert held["examples"] == [len(rows) for rows in experiment.partition.train]
    assert held["noun"] == {"diabetes": "range", "digits-multilabel": "label", "digits-segmentation": "class"}[dataset]
    if dataset == "diabetes":
        assert [sum(line) for line in held["counts"]] == held["examples"]


def test_checkpoint_score_follows_the_headline_in_its_direction() -> None:
    from fedloom.evaluation import Row
    from fedloom.evaluation.metrics import MetricInfo

    declared = {"mae": MetricInfo(False), "rmse": MetricInfo(False, headline=True), "accuracy": MetricInfo(True)}
    rows = tuple(Row(1, "server", "a", "", "global", name, value) for name, value in (("rmse", 2.0), ("accuracy", 9.0)))
    assert checkpoint_score(rows, declared) == -2.0


def plane() -> fl.Dataset:
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    y = x @ torch.tensor([1.0, -2.0, 0.5])
    return fl.Dataset("plane", Examples(x[:40], y[:40]), Examples(x[40:], y[40:]), 1, fl.preparations["plain"])


@pytest.mark.parametrize("task", ["regression", fl.tasks.regression, TASKS["regression"], None])
def test_simulation_task_as_name_entry_or_object_runs_and_is_written(task: Any, tmp_path: Any) -> None:
    sim = fl.Simulation(
        dataset=plane(), devices=3, tiers=fl.tiers(fl.models.mlp, {"hidden": (4,)}, all={"share": 1.0}),
        method="fedavg", task=task, rounds=1,
    )  # fmt: skip
    (result,) = sim.rounds()
    assert set(result.metrics["all"]) == {"rmse", "mae", "r2", "loss"}
    assert sim.to_recipe()["task"] == ({} if task is None else {"kind": "regression"})
    again = fl.Simulation.from_recipe(sim.to_recipe(), registries=sim.registries)
    assert next(iter(again.rounds())).metrics == result.metrics


def test_simulation_own_task_is_one_of_its_own_names() -> None:
    own = LearningTask("errors", "Numbers by their absolute error.", "number", "", "mae", ("mae", "r2"))
    sim = fl.Simulation(
        dataset=plane(), devices=3, tiers=fl.tiers(fl.models.mlp, {"hidden": (4,)}, all={"share": 1.0}),
        method="fedavg", task=own, rounds=1,
    )  # fmt: skip
    (result,) = sim.rounds()
    assert set(result.metrics["all"]) == {"mae", "r2"}
    assert result.headline == "mae"
    assert sim.run.manifest["own_names"]["tasks"] == ["errors"]


def test_own_loss_by_name_trains_numbers() -> None:
    def quartic(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (logits - labels).pow(4)

    sim = fl.Simulation(
        dataset=plane(), devices=3, tiers=fl.tiers(fl.models.mlp, {"hidden": (4,)}, all={"share": 1.0}),
        method="fedavg", client=fl.ClientConfig(loss=quartic, optimizer=fl.optimizers.sgd(lr=0.001)), rounds=1,
    )  # fmt: skip
    assert sim.recipe["training"]["loss"] == {"kind": "quartic"}
    (result,) = sim.rounds()
    assert result.metrics["all"]["rmse"] > 0


def test_label_flip_mirrors_targets_of_every_kind() -> None:
    from fedloom.engines.attacks import _opposite

    for name in ("diabetes", "digits-multilabel", "digits-segmentation"):
        dataset = DATASETS[name]()
        flipped = _opposite(dataset, dataset.train.y)
        torch.testing.assert_close(_opposite(dataset, flipped), dataset.train.y, atol=1e-5, rtol=0)
        assert not torch.equal(flipped, dataset.train.y)
        assert dataset.task.find_problem(dataset.train.x, flipped, dataset.classes) is None
