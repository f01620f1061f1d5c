"""Parts of a simulation: names or objects of one's own, frozen and hashable, refused with a sentence where wrong."""

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedloom as fl
from fedloom.client import ClientResult, Sgd, fit, label_loss, like, on_device
from fedloom.data import DataBroken, Dataset, Examples, Partition, Preparation
from fedloom.data.adapters import as_dataset
from fedloom.footprints import ClientUpdate, Rule
from fedloom.methods import Method, MethodInfo
from fedloom.methods.mixed import MethodPart
from fedloom.recipe.schema import TrainingConfig
from fedloom.settings import FrozenDict
from fedloom.tracking import Tracker
from tests.api.conftest import fingerprints, results_of

ONE_TIER = fl.tiers(fl.models.convnet, {"hidden": (2, 4)}, all={"share": 1.0})


def run_one(sim: fl.Simulation) -> fl.Run:
    list(sim.rounds(1))
    return sim.run


def always_one(logits, labels):
    return 1.0


def test_metrics_as_names_choices_functions_and_objects_have_a_row_each(make):
    brier = fl.Metric("brier", lambda logits, labels: 0.5, higher_is_better=False)
    sim = make(evaluation={"metrics": ["accuracy", fl.metrics.calibration_error(bins=5), always_one, brier]})
    (result,) = sim.rounds(1)
    assert set(result.metrics["small"]) == {"accuracy", "calibration_error", "always_one", "brier"}
    assert (result.metrics["small"]["always_one"], result.metrics["small"]["brier"]) == (1.0, 0.5)
    assert sim.run.manifest["metrics"]["brier"] == {"higher_is_better": False, "unit": ""}
    assert sim.recipe["evaluation"]["metrics"][1] == {"kind": "calibration_error", "bins": 5}


def test_metric_of_a_taken_name_and_lambdas_are_refused(make):
    def accuracy(logits, labels):
        return 0.0

    other = partial(always_one)
    other.__name__ = "always_one"
    with pytest.raises(ValueError, match="there is already another metric 'accuracy'"):
        make(evaluation={"metrics": [accuracy]})
    with pytest.raises(ValueError, match="there is already another metric 'always_one'; give yours a name of its own"):
        make(evaluation={"metrics": [always_one, fl.Metric("always_one", lambda logits, labels: 2.0)]})
    with pytest.raises(ValueError, match="a metric needs a name"):
        make(evaluation={"metrics": [lambda logits, labels: 1.0]})
    with pytest.raises(TypeError, match="a metric is a name, a function of logits and labels, or a Metric, not 3"):
        make(evaluation={"metrics": [3]})


def every_other(labels, devices, generator, *, offset: int = 0):
    return Partition(
        [np.arange(offset + device, len(labels.train), devices) for device in range(devices)],
        [np.arange(device, len(labels.test), devices) for device in range(devices)],
    )


def test_partition_function_decides_who_has_what(make):
    sim = make(partition=every_other, devices=3)
    assert sim.recipe["data"]["partition"] == {"kind": "every_other"}
    run = run_one(sim)
    assert run.manifest["own_names"] == {"partitions": ["every_other"]}
    shifted = make(partition=partial(every_other, offset=1), devices=3)
    assert shifted.recipe["data"]["partition"] == {"kind": "every_other", "offset": 1}
    assert run_one(shifted).manifest["partition"] != run.manifest["partition"]


@dataclass(frozen=True)
class Midrange(Rule):
    """Half way between the least and the largest."""

    shift: float = 0.0

    def aggregate(self, old, values, contributors):
        return (values.amin(0) + values.amax(0)) / 2 + self.shift


def test_aggregation_rule_as_class_object_or_mapping(make):
    runs = {
        name: make(aggregation=rule, data={"max_examples": 20}, partition="iid", devices=6)
        for name, rule in {
            "none": None, "class": Midrange, "object": Midrange(), "shifted": Midrange(shift=1.0),
            "mapping": {"rule": Midrange(), "min_contributors": 3},
        }.items()
    }  # fmt: skip
    assert runs["class"].recipe["aggregation"]["rule"] == "midrange"
    assert runs["shifted"].recipe["aggregation"] == {**runs["class"].recipe["aggregation"], "shift": 1.0}
    bits = {name: fingerprints(run_one(sim)) for name, sim in runs.items()}
    assert bits["class"] == bits["object"] == bits["mapping"]
    assert len({bits["none"], bits["class"], bits["shifted"]}) == 3


class Listing(Tracker):
    seen: list

    def __init__(self):
        self.seen = []

    def begin(self, run):
        self.seen.append(run.name)

    def rows(self, rows):
        self.seen.append(len(rows))

    def end(self, status):
        self.seen.append(status)


def test_trackers_as_function_object_class_and_name_get_every_row(make):
    heard, tracker = [], Listing()
    sim = make(rounds=2)
    results = list(sim.rounds(track=[heard.extend, tracker, Listing, "csv", fl.trackers.csv(file="other.csv")]))
    assert heard == [row for result in results for row in result.rows]
    assert len(list(sim.rounds(1, track="csv"))) == 1
    assert tracker.seen == ["heterofl", *(len(result.rows) for result in results), "finished"]
    assert [len(pandas.read_csv(sim.folder / name)) for name in ("rows.csv", "other.csv")] == [3, 2]  # a line per round


@dataclass(frozen=True)
class SignDescent:
    """A step of the same length in every direction."""

    lr: float = 0.01

    def start(self, weights):
        return {}

    def step(self, weights, gradient, state, active):
        for name, weight in weights.items():
            moving = active.view(-1, *[1] * (weight.dim() - 1))
            weight.sub_(self.lr * gradient[name].sign() * moving)


def test_optimizer_of_ones_own_trains_and_is_a_name_with_settings(make):
    sims = [make(client=fl.ClientConfig(batch_size=100, optimizer=one)) for one in (SignDescent(0.05), SignDescent)]
    assert sims[0].recipe["training"]["optimizer"] == {"kind": "signdescent", "lr": 0.05}
    assert sims[1].recipe["training"]["optimizer"] == {"kind": "signdescent"}
    assert fingerprints(run_one(sims[0])) != fingerprints(run_one(sims[1]))
    built_in = make(client=fl.ClientConfig(optimizer=Sgd(lr=0.3)))
    assert built_in.recipe["training"]["optimizer"] == {"kind": "sgd", "lr": 0.3}


@dataclass(frozen=True)
class Halving:
    """Half the learning rate in every round."""

    def factor(self, round_number):
        return 0.5**round_number


def test_lr_schedule_of_ones_own_scales_the_steps(make):
    plain, halved = (
        make(client=fl.ClientConfig(batch_size=100, lr_schedule=schedule, optimizer=fl.optimizers.sgd(lr=lr)))
        for schedule, lr in (("constant", 0.1), (Halving(), 0.2))
    )
    assert fingerprints(run_one(plain)) == fingerprints(run_one(halved))


def absolute_error(logits, labels):
    return (logits.softmax(-1) - F.one_hot(labels, logits.shape[-1])).abs().sum(-1)


def torch_loss(input, target):
    return F.cross_entropy(input, target, reduction="none")


def test_loss_as_function_object_or_choice(make):
    losses = {
        "default": "cross_entropy", "own": absolute_error, "torch": torch_loss,
        "module": nn.CrossEntropyLoss(reduction="none"), "focal": fl.losses.focal(gamma=0.0),
    }  # fmt: skip
    bits = {
        name: fingerprints(run_one(make(client=fl.ClientConfig(batch_size=100, loss=loss))))
        for name, loss in losses.items()
    }
    assert bits["default"] == bits["torch"] == bits["module"] != bits["own"]


def perceptron(input_shape, classes, *, width: float = 1.0, units: int = 8):
    middle = round(units * width)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, middle), nn.ReLU(), nn.Linear(middle, classes))


def test_model_factory_of_ones_own_and_partial_and_by_tier(make):
    tiers = fl.tiers(perceptron, large={"share": 0.5}, small={"share": 0.5, "width": 0.5})
    run = run_one(make(tiers=tiers))
    assert run.model("small").net[1].weight.shape == (4, 64)
    wide = make(tiers=fl.tiers(partial(perceptron, units=12), all={"share": 1.0}))
    assert wide.recipe["model"] == {"family": "perceptron", "units": 12}
    own = make(
        tiers={"a": {"share": 0.5, "model": perceptron}, "b": {"share": 0.5, "model": fl.models.mlp}},
        method="standalone",
    )
    assert [tier["family"] for tier in own.recipe["tiers"]] == ["perceptron", "mlp"]
    with pytest.raises(TypeError, match="Sequential is a finished module; pass its class or a function that builds it"):
        make(tiers=fl.tiers(perceptron((1, 8, 8), 10), all={"share": 1.0}))


@dataclass(frozen=True)
class Stubborn(Method):
    """Moves only a part of the way to the mean."""

    info = MethodInfo(uploads="weights")
    part: float = 0.5
    never: int | None = 3

    def round(self, server, context):
        old = server["weights"]
        replies = context.ask(self.train, {d: {"weights": d.footprint.read(old)} for d in context.cohort})
        new = context.aggregate(old, [ClientUpdate(r.device.footprint, r.upload["weights"], 1.0) for r in replies])
        return {"weights": {name: old[name] + self.part * (new[name] - old[name]) for name in old}}

    @on_device(sends={"weights": like("weights")})
    def train(self, client, inbox):
        return ClientResult(upload={"weights": fit(client, inbox["weights"], label_loss(client))})


def test_method_as_class_and_instance_and_inside_mixed(make):
    assert make(method=Stubborn).recipe["method"] == {"name": "stubborn"}
    sim = make(method=Stubborn(part=0.25))
    assert sim.recipe["method"] == {"name": "stubborn", "part": 0.25}
    assert fingerprints(run_one(sim)) != fingerprints(run_one(make(method=Stubborn())))
    parts = (MethodPart(("large",), fl.methods.HeteroFL()), MethodPart(("small",), Stubborn(part=1.0)))
    mixed = make(method=fl.methods.Mixed(parts=parts))
    assert [part["method"] for part in mixed.recipe["method"]["parts"]] == ["heterofl", "stubborn"]
    again = fl.Simulation.from_recipe(mixed.to_recipe(), registries=mixed.registries)
    assert fingerprints(run_one(again)) == fingerprints(run_one(mixed))
    with pytest.raises(TypeError, match="never=None cannot be written into a recipe"):
        make(method=Stubborn(never=None))


def numbers(count=60):
    draw = np.random.default_rng(0)
    return draw.normal(size=(count, 1, 6, 6)).astype(np.float32), np.arange(count) % 3


class Pairs(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def test_dataset_as_arrays_torch_dataset_or_dataset_has_one_result(make):
    x, y = numbers()
    whole = as_dataset((x, y))
    forms = {
        "arrays": (x, y), "tensors": (torch.from_numpy(x), torch.from_numpy(y)), "torch": Pairs(x, y), "dataset": whole,
        "lists": (x.tolist(), y.tolist()), "pairs": ((whole.train.x, whole.train.y), (whole.test.x, whole.test.y)),
        "splits": (*(part.numpy() for part in (whole.train.x, whole.train.y, whole.test.x, whole.test.y)),),
    }  # fmt: skip
    runs = {name: run_one(make(dataset=form, devices=2, data=None, partition="iid")) for name, form in forms.items()}
    assert {fingerprints(run) for run in runs.values()} == {fingerprints(runs["arrays"])}
    assert runs["arrays"].model("small")(torch.from_numpy(x[:2])).shape == (2, 3)


def test_dataset_as_frame_with_label_column(make):
    draw = np.random.default_rng(0)
    frame = pandas.DataFrame(draw.normal(size=(50, 4)), columns=list("abcd")).assign(kind=np.arange(50) % 2)
    linear = fl.tiers(lambda input_shape, classes: nn.Linear(4, classes), all={"share": 1.0})
    run = run_one(make(dataset=(frame, "kind"), tiers=linear, method="fedavg", devices=2, data=None, partition="iid"))
    assert (run.folder / "models" / "all.safetensors").is_file()
    with pytest.raises(DataBroken, match="there is no column 'sort'") as caught:
        make(dataset=(frame, "sort"), tiers=linear)
    assert "kind" in caught.value.hint
    with pytest.raises(DataBroken, match="a column is not numeric"):
        make(dataset=(frame.assign(a="text"), "kind"), tiers=linear)
    whole = as_dataset((pandas.DataFrame({"a": [1, 2, 3, 4, 5], "b": [0, 1, 0, 1, 0]}), "b"))
    assert whole.train.x.dtype == torch.float32  # not token ids


def test_dataset_of_integers_is_tokens(make):
    x = np.random.default_rng(0).integers(0, 9, (60, 4))
    parts = {"dataset": (x, x[:, 0] % 3), "method": "fedavg", "devices": 2, "data": None, "partition": "iid"}
    (result,) = make(tiers=fl.tiers(fl.models.lstm, all={"share": 1.0}), **parts).rounds(1)
    assert 0 <= result.metrics["all"]["accuracy"] <= 100
    with pytest.raises(fl.RecipeError, match="MODEL_BUILD: mlp cannot be built"):
        make(tiers=fl.tiers(fl.models.mlp, all={"share": 1.0}), **parts)


def test_dataset_that_cannot_be_one_is_refused_with_a_sentence(make):
    x, y = numbers()
    for wrong, sentence in (
        ((x, y[:-1]), "60 examples but 59 labels"),
        (42, "no data set can be made of int"),
        ((x, np.eye(3)[y]), "Labels are integers"),
        ((), "no data set can be made of"),
        ((x, y - 1), "labels from -1 to 1"),
        ((x[:2], y[:2]), "too few to hold out"),
    ):
        with pytest.raises(DataBroken, match=sentence):
            make(dataset=wrong)


def test_dataset_in_a_folder_of_its_own(make, tmp_path):
    draw = np.random.default_rng(0)
    content = {
        f"{split}_{kind}": value
        for split, count in (("train", 40), ("test", 20))
        for kind, value in (
            ("images", draw.integers(0, 255, (count, 8, 8), dtype=np.uint8)), ("labels", np.arange(count) % 9),
        )
    }  # fmt: skip
    np.savez(
        tmp_path / "pathmnist.npz", **content, val_images=content["test_images"], val_labels=content["test_labels"]
    )
    sim = make(dataset=fl.datasets.pathmnist(folder=tmp_path), devices=2, data=None, partition="iid")
    assert sim.recipe["data"]["dataset"] == "pathmnist_2"
    assert run_one(sim).manifest["test_examples"] == 20


def test_compression_and_faults_reach_the_recipe(make):
    timed = {"speed": 1e9, "bandwidth": 1e6}
    sim = make(
        compression={"uplink": fl.compressors.float16(), "downlink": "float16"},
        faults={"dropout": 0.5, "stragglers": fl.stragglers.lognormal(speed=0.2)},
        fleet={"participation": 0.5},
        tiers=fl.tiers(fl.models.convnet, {"hidden": (2, 4)}, all={"share": 1.0, **timed}),
    )
    assert sim.recipe["compression"] == {"uplink": {"kind": "float16"}, "downlink": {"kind": "float16"}}
    assert sim.recipe["faults"]["stragglers"] == {"kind": "lognormal", "speed": 0.2}
    (result,) = sim.rounds(1)
    assert {"simulated_seconds", "bytes_up_compressed"} <= {row.metric for row in result.rows}
    assert result.traffic.asked == 2
    alone = make(compression=fl.compressors.float16())
    assert alone.recipe["compression"] == {"uplink": {"kind": "float16"}}


def test_privacy_adds_epsilon_to_every_round(make):
    sim = make(
        privacy={"clip": 1.0, "noise": 1.0}, fleet={"participation": 0.5, "sampling": "poisson"},
        method=fl.methods.FedAvg(weighting="uniform"),
        tiers=fl.tiers(fl.models.mlp, {"hidden": (4,)}, all={"share": 1.0}),
    )  # fmt: skip
    (result,) = sim.rounds(1)
    assert [row.value > 0 for row in result.rows if row.metric == "epsilon"] == [True]


def test_two_objects_of_one_name_get_two_names(make):
    def build(units):
        def net(input_shape, classes):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, units), nn.Linear(units, classes))

        return net

    tiers = {"a": {"share": 0.5, "model": build(3)}, "b": {"share": 0.5, "model": build(5)}}
    sim = make(tiers=tiers, method="standalone")
    assert [tier["family"] for tier in sim.recipe["tiers"]] == ["net", "net_2"]
    shown = fl.plan(sim).to_dict()["tiers"]
    assert [tier["parameters"] for tier in shown] == [65 * 3 + 4 * 10, 65 * 5 + 6 * 10]


def test_lambdas_get_a_name(make):
    sim = make(
        tiers=fl.tiers(
            lambda input_shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(64, classes)), a={"share": 1.0}
        )
    )
    assert sim.recipe["model"] == {"family": "lambda"}


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"client": {"optimizer": fl.partitions.iid()}}, "where one of the optimizers is needed"),
        ({"partition": fl.optimizers.sgd}, "is one of the optimizers, where one of the partitions is needed"),
        ({"client": {"optimizer": fl.methods.HeteroFL()}}, "cannot be one of the optimizers: it has no method step"),
        ({"client": {"optimizer": 0.1}}, "0.1 cannot be one of the optimizers"),
        ({"client": {"optimizer": torch.optim.SGD}}, "cannot be one of the optimizers: it has no method start"),
        ({"client": {"lr_schedule": lambda round_number: 0.5}}, "it needs round_number. Pass an object with the"),
        ({"aggregation": torch.median}, "cannot be one of the aggregation"),
        ({"partition": 3}, "3 cannot be one of the partitions"),
        ({"method": fl.methods.fedavg}, "methods.fedavg is a module; take the class in it"),
        ({"method": 3}, "3 is not a method"),
        ({"method": Midrange}, "is not a method"),
        ({"tiers": 3}, "3: tiers come from fedloom.tiers"),
        ({"tiers": {"a": 0.5}}, "the tier 'a' is a mapping such as"),
        ({"tiers": None}, "tiers is required"),
        ({"client": 3}, "client is a ClientConfig"),
        ({"fleet": 0.5}, "fleet is a mapping with the keys of the recipe's section, not 0.5"),
        ({"data": {"dataset": "digits"}}, "dataset is an argument of its own"),
        ({"devices": 5}, "the partition is for 4 devices, but devices is 5"),
    ],
)  # fmt: skip
def test_parts_of_the_wrong_kind_are_refused_with_a_sentence(parts, sentence, make):
    with pytest.raises(TypeError) as caught:
        make(**parts)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("parts", "key", "hint"),
    [
        ({"client": fl.ClientConfig(epochs=0)}, ("training", "epochs"), ""),
        ({"client": fl.ClientConfig(optimizer=fl.optimizers.sgd(lr=-1.0))}, ("training", "optimizer", "lr"), ""),
        ({"client": fl.ClientConfig(optimizer="sgdd")}, ("training", "optimizer", "kind"), "'sgd'"),
        ({"client": {"epoch": 2}}, ("training", "epoch"), "'epochs'"),
        ({"method": "heteroffl"}, ("method", "name"), "'heterofl'"),
        ({"dataset": "digit"}, ("data", "dataset"), "'digits'"),
        ({"fleet": {"participation": 2.0}}, ("fleet", "participation"), ""),
        ({"evaluation": {"metrics": ["acuracy"]}}, ("evaluation", "metrics", 0, "kind"), "'accuracy'"),
        ({"privacy": {"clip": -1.0}}, ("privacy", "clip"), ""),
        ({"engine": "in_proces"}, ("engine", "kind"), "'in_process'"),
        ({"rounds": 0}, ("rounds",), ""),
    ],
)  # fmt: skip
def test_values_out_of_range_are_recipe_errors_with_key_reason_and_hint(parts, key, hint, make):
    with pytest.raises(fl.RecipeError) as caught:
        make(**parts)
    (issue,) = caught.value.issues
    assert issue.key_path == key and issue.message and hint in issue.hint


def test_unknown_settings_are_refused_where_they_are_written():
    with pytest.raises(TypeError, match=r"optimizers.sgd has no setting 'lrr'; did you mean 'lr'\?"):
        fl.optimizers.sgd(lrr=0.1)
    with pytest.raises(TypeError, match=r"optimizers.sgd takes its settings by name, such as lr=0.1"):
        fl.optimizers.sgd(0.1)
    with pytest.raises(AttributeError, match=r"there is no optimizers\.sgdd; did you mean 'sgd'"):
        fl.optimizers.sgdd  # noqa: B018
    with pytest.raises(TypeError, match="tiers needs at least one tier"):
        fl.tiers(fl.models.convnet)


PAIRS = [
    lambda: fl.optimizers.sgd(lr=0.1),
    lambda: fl.partitions.dirichlet(devices=20, alpha=0.3),
    lambda: fl.ClientConfig(epochs=2, optimizer=fl.optimizers.adam(lr=0.01)),
    lambda: fl.ClientConfig(optimizer={"kind": "sgd", "lr": 0.1}),
    lambda: fl.tiers(fl.models.convnet, {"hidden": [2, 4]}, a={"share": 0.5}, b={"share": 0.5, "hidden": [1, 2]}),
    lambda: fl.methods.HeteroFL(mask_unseen_labels=False),
    lambda: fl.methods.Mixed(parts=(MethodPart(("a",), fl.methods.FedAvg()),)),
]


@pytest.mark.parametrize("part", PAIRS)
def test_parts_are_hashable_and_equal_by_value(part):
    one, other = part(), part()
    assert one == other and hash(one) == hash(other) and len({one, other}) == 1
    assert one == copy.deepcopy(one)
    assert " at 0x" not in repr(one)
    name = fields(one)[0].name
    with pytest.raises(FrozenInstanceError):
        setattr(one, name, None)


def test_parts_have_a_repr_that_can_be_read():
    assert repr(fl.optimizers.sgd(lr=0.1)) == "optimizers.sgd(lr=0.1)"
    assert repr(fl.tiers(fl.models.convnet, {"hidden": [2]}, a={"share": 1.0})) == (
        "tiers(convnet, {'hidden': (2,)}, a={'share': 1.0})"
    )
    assert repr(fl.optimizers.sgd).startswith("<optimizers.sgd: Stochastic gradient descent")


def test_frozen_settings_cannot_be_changed():
    settings = fl.optimizers.sgd(lr=0.1).settings
    for change in (
        lambda: settings.update(lr=1.0), lambda: settings.pop("lr"), lambda: settings.setdefault("x", 1),
        lambda: settings.__setitem__("lr", 1.0), lambda: settings.__delitem__("lr"), settings.clear,
    ):  # fmt: skip
        with pytest.raises(TypeError, match="frozen"):
            change()
    assert settings == {"lr": 0.1} == pickle.loads(pickle.dumps(settings)) and type(copy.copy(settings)) is FrozenDict  # noqa: S301


def test_client_config_has_the_fields_of_the_recipe():
    assert {one.name for one in fields(fl.ClientConfig)} == set(TrainingConfig.model_fields)
    defaults = TrainingConfig()
    for one in fields(fl.ClientConfig):
        written = getattr(defaults, one.name)
        assert written == ({"kind": one.default} if isinstance(written, dict) else one.default)


def test_same_simulation_of_objects_and_of_names_is_one_recipe(make):
    named = make(
        dataset="digits", partition={"kind": "iid"}, devices=4, method="heterofl", client={"batch_size": 100},
        tiers=fl.tiers("convnet", {"hidden": (2, 4)}, large={"share": 0.5}, small={"share": 0.5, "width": 0.5}),
    )  # fmt: skip
    assert {**named.recipe, "training": None} == {**make().recipe, "training": None}
    assert results_of(run_one(named)) == results_of(run_one(make()))


def test_dataset_object_keeps_its_name(make):
    x, y = numbers()
    data = Dataset(
        "mine",
        Examples(torch.from_numpy(x), torch.from_numpy(y)),
        Examples(torch.from_numpy(x[:9]), torch.from_numpy(y[:9])),
        3,
        Preparation(),
    )
    assert make(dataset=data, devices=2, data=None, partition="iid").recipe["data"]["dataset"] == "mine"
    assert Path("data").exists() is False
