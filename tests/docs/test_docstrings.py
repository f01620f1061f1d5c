"""Everything that a user picks by name or imports is described where it is defined."""

import ast
import dataclasses
import doctest
import importlib
import inspect
from types import FunctionType

import pytest
import torch

import fedloom
from fedloom.cli.listing import setting_lines
from fedloom.footprints import ClientUpdate, Footprint, RobustAggregator, Rule
from fedloom.footprints.robust import Contributors
from fedloom.methods import Method
from fedloom.methods.fedavg import FedAvg
from fedloom.recipe.registries import KINDS, PASSED, Registries
from fedloom.registry import Entry, Registry
from fedloom.studies.controls import CONTROLS
from fedloom.testing import TinyWorld, same_parcel

MODULES = (
    "client", "fleet", "footprints", "methods", "methods.method", "models", "data", "engines", "exporting", "tensors",
    "seeds", "registry", "logs", "results", "evaluation", "testing", "tracking", "api.parts", "api.simulation",
    "api.verbs", "api.run", "api.reproduce",
)  # fmt: skip

RETURNED = (  # what functions of the modules above return, or raise
    "recipe.registries.Registries", "recipe.errors.RecipeError", "recipe.errors.RecipeIssue", "runs.loop.RoundResult",
    "runs.resume.Verdict", "analysis.audit.Audit", "analysis.trained.CkaMap", "analysis.export_run.ExportResult",
    "evaluation.metrics.Metric", "evaluation.metrics.MetricInfo",
)  # fmt: skip

UNDESCRIBED = {
    # stubs of protocols, whose implementations are described
    "client.Optimizer.lr", "client.Optimizer.start", "client.Optimizer.step", "client.LRSchedule.factor",
    "fleet.Transport.side", "fleet.Transport.open", "fleet.ByteCounter.bytes_down", "fleet.ByteCounter.bytes_up",
    "engines.ClientStates.committed", "engines.ClientStates.versions", "engines.ClientStates.commit",
    "engines.ClientStates.rollback", "engines.Executor.register", "engines.Executor.run", "engines.Executor.close",
    # implementations of a protocol that say nothing of their own
    "engines.AttackTransport.open", "engines.BytesTransport.open", "engines.DeviceEnd.open",
    "engines.FaultInjector.open", "engines.NormScreening.open", "engines.ServerEnd.open", "engines.DryRun.ask",
    "engines.DryRun.commit", "engines.DryRun.close", "engines.InlineExecutor.register", "engines.InlineExecutor.run",
    "engines.InlineExecutor.close", "engines.Lockstep.register", "engines.Lockstep.run", "engines.Lockstep.close",
    "engines.WorkerPool.close", "testing.InterceptingEngine.ask", "testing.InterceptingEngine.commit",
    "testing.ScriptedEngine.ask", "testing.ScriptedEngine.commit", "tracking.CSV.begin", "tracking.CSV.rows",
    "tracking.CSV.end", "tracking.TensorBoard.begin", "tracking.TensorBoard.rows", "tracking.TensorBoard.end",
    "tracking.MLflow.begin", "tracking.MLflow.rows", "tracking.MLflow.end", "tracking.WeightsAndBiases.begin",
    "tracking.WeightsAndBiases.rows", "tracking.WeightsAndBiases.end",
    "models.Scaler.forward", "models.Scaler.extra_repr", "exporting.ExportModule.forward",
}  # fmt: skip


def entries(kind):
    if kind == "controls":
        return [Entry(kind, name, control, ("document", "fleet")) for name, control in CONTROLS.items()]
    table = getattr(Registries(), kind)
    return [Entry(kind, name, table[name], PASSED.get(kind, ())) for name in table]


def public_names(path):
    """The classes and functions that a module of the package exports, by name."""
    module = importlib.import_module(f"fedloom.{path}")
    defined = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    exported = getattr(module, "__all__", [name for name in defined if not name.startswith("_")])
    values = {name: getattr(module, name) for name in exported}
    return {name: value for name, value in values.items() if isinstance(inspect.unwrap(value), type | FunctionType)}


def public_members(path, owners=None):
    """(place, class, name, function) for every method and property that the module's classes define themselves."""
    for owner_name, owner in (public_names(path) if owners is None else owners).items():
        fields = parameters(owner)  # a default may be a function
        for name, member in vars(owner).items() if isinstance(owner, type) else ():
            function = getattr(member, "__func__", getattr(member, "fget", getattr(member, "func", member)))
            if isinstance(function, FunctionType) and not name.startswith("_") and name not in fields:
                yield f"{path}.{owner_name}.{name}", owner, name, function


def parameters(value):
    """The parameters of a function, or the public fields or arguments of a class."""
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value) if not field.name.startswith("_")]
    if hasattr(value, "_fields"):
        return list(value._fields)
    if isinstance(value, type):
        own = vars(value).get("__new__" if issubclass(value, tuple) else "__init__")
        is_stub = own is None or getattr(value, "_is_protocol", False)
        return [] if is_stub else list(inspect.signature(own).parameters)[1:]
    return [name for name in inspect.signature(value).parameters if name not in ("self", "cls")]


def undescribed_parameters(value, passed=()):
    described = {name.lstrip("*"): text for name, text in setting_lines(value).items()}
    return [name for name in parameters(value) if name not in passed and not described.get(name)]


def passed_to(value):
    """What fedloom passes to an entry of a registry itself, which is the same for all of a kind."""
    kinds = [kind for kind in KINDS if any(value is entry.target for entry in entries(kind))]
    return PASSED.get(kinds[0], ()) if kinds else ()


@pytest.mark.parametrize("kind", [*KINDS, "controls"])
def test_registry_entries_have_a_sentence_each_and_describe_every_setting(kind):
    sentences = {entry.name: entry.summary for entry in entries(kind)}
    assert [name for name, sentence in sentences.items() if not sentence.endswith(".")] == []
    assert len(set(sentences.values())) == len(sentences)
    described = {entry.name: setting_lines(entry.target) for entry in entries(kind)}
    settings = [(entry.name, setting) for entry in entries(kind) for setting in entry.parameters]
    assert [(name, setting) for name, setting in settings if not described[name].get(setting)] == []


@pytest.mark.parametrize("path", MODULES)
def test_public_names_have_a_docstring_that_describes_every_parameter(path):
    names = public_names(path)
    # a dataclass without a docstring has its signature as one
    assert [name for name, value in names.items() if not value.__doc__ or value.__doc__.startswith(f"{name}(")] == []
    missing = {name: undescribed_parameters(value, passed_to(value)) for name, value in names.items()}
    assert {name: lacking for name, lacking in missing.items() if lacking} == {}


@pytest.mark.parametrize("path", MODULES)
def test_public_members_have_a_docstring_that_describes_every_parameter(path):
    problems = []
    for place, owner, name, function in public_members(path):
        overrides = any(name in vars(base) for base in owner.__mro__[1:])
        if place in UNDESCRIBED or overrides:
            continue
        if not function.__doc__ or undescribed_parameters(function):
            problems.append((place, undescribed_parameters(function)))
    assert problems == []


@pytest.mark.parametrize("place", RETURNED)
def test_what_is_returned_describes_its_fields_and_members(place):
    path, _, name = place.rpartition(".")
    value = getattr(importlib.import_module(f"fedloom.{path}"), name)
    assert value.__doc__ and not value.__doc__.startswith(f"{name}(")
    assert undescribed_parameters(value) == []
    for where, owner, member, function in public_members(path, {name: value}):
        if not any(member in vars(base) for base in owner.__mro__[1:]):
            assert function.__doc__ and undescribed_parameters(function) == [], where


def test_every_public_name_of_the_package_is_described():
    covered = {id(value) for path in MODULES for value in public_names(path).values()}
    covered |= {id(value) for path in ("recipe.registries", "recipe.errors") for value in public_names(path).values()}
    covered |= {id(value) for value in public_names("evaluation.metrics").values()}
    for name in fedloom.__all__:
        value = getattr(fedloom, name)
        if isinstance(value, type | FunctionType):
            assert id(value) in covered, name
        elif not isinstance(value, Registry):
            assert value.__doc__, name  # a module


@pytest.mark.parametrize("path", MODULES)
def test_examples_are_valid_python(path):
    members = [function for _, _, _, function in public_members(path)]
    for value in [*public_names(path).values(), *members]:
        for example in doctest.DocTestParser().get_examples(value.__doc__ or ""):
            ast.parse(example.source)


def run_example(value):
    """Run the one example of a docstring with the public names; returns all names."""
    names = {name: one for path in MODULES for name, one in vars(importlib.import_module(f"fedloom.{path}")).items()}
    names |= {"dataclass": dataclasses.dataclass, "Tensor": torch.Tensor, "Contributors": Contributors}
    (example,) = doctest.DocTestParser().get_examples(value.__doc__)
    exec(compile(example.source, value.__name__, "exec"), names)
    return names


def test_method_example_is_fedavg():
    mine, world = run_example(Method)["MyFedAvg"](), TinyWorld.make()
    served = [world.play(method, world.engine(method), rounds=2) for method in (mine, FedAvg())]
    assert same_parcel(*served)


def test_rule_example_is_applied_to_every_region():
    aggregate = RobustAggregator(run_example(Rule)["Midrange"]())
    weights = {"w": torch.zeros(2, 2)}
    covered = Footprint({"w": (slice(0, 2), slice(0, 2))})
    updates = [ClientUpdate(covered, {"w": torch.full((2, 2), value)}, 1.0) for value in (0.0, 1.0, 8.0)]
    assert aggregate(weights, updates)["w"].tolist() == [[4.0, 4.0], [4.0, 4.0]]


def test_exceptions_exist():
    assert UNDESCRIBED - {place for path in MODULES for place, *_ in public_members(path)} == set()
