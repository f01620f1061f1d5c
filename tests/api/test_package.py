"""The package as `import fedloom` gives it: cheap, with its public names and nothing else."""

import ast
import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import fedloom as fl
from fedloom.cli.app import VERBS

HEAVY = ("torch", "numpy", "pydantic", "matplotlib", "pandas", "flwr", "rich", "typer")
LAZILY = f"""
import json, sys
import fedloom
found = sorted(set(sys.modules) & set({HEAVY!r}))
names = dir(fedloom)
still = sorted(set(sys.modules) & set({HEAVY!r}))
print(json.dumps([found, still, names]))
"""


def test_import_loads_nothing_heavy_and_dir_neither():
    done = subprocess.run([sys.executable, "-c", LAZILY], capture_output=True, text=True, timeout=60, check=True)
    found, still, names = json.loads(done.stdout)
    assert found == still == []
    assert names == sorted([*fl.__all__, "__version__"])


def test_all_names_are_sorted_and_exist():
    assert fl.__all__ == sorted(fl.__all__) and len(set(fl.__all__)) == len(fl.__all__)
    for name in fl.__all__:
        assert getattr(fl, name) is not None
    with pytest.raises(AttributeError, match="module 'fedloom' has no attribute 'simulation'"):
        fl.simulation  # noqa: B018


def test_type_checkers_see_every_lazy_name():
    """What `if TYPE_CHECKING` imports is what `__getattr__` gives."""
    tree = ast.parse(Path(fl.__file__).read_text(encoding="utf-8"))
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {}
    for statement in guarded.body:
        module = importlib.import_module(f".{statement.module}" if statement.module else ".", "fedloom")
        for alias in statement.names:
            seen[alias.asname or alias.name] = getattr(module, alias.name)
    assert set(seen) == set(fl.__all__) - {"logs"}
    assert all(seen[name] is getattr(fl, name) for name in seen)


NO_TWIN = {
    "list": "the registries themselves: fl.methods, fl.models, …",
    "init": "Simulation.to_recipe(file) writes a recipe",
    "doctor": "about the installation, not about experiments",
    "probe": "measures a device where it runs",
    "calibrate": "writes a setting of this machine into a recipe",
}


def test_every_verb_has_a_function_of_its_name():
    """`deploy` is a group of commands for machines of a real fleet."""
    assert set(VERBS) - set(fl.__all__) == set(NO_TWIN)


# files: extensions and registries; device: sets=["engine.device=…"]
OF_THE_TERMINAL = {"format", "no_report", "quiet", "files", "open_page", "device"}
OTHERWISE = {
    "check": {"recipes"},  # one at a time
    "report": {"watch", "every", "port", "parent"},  # of a run that goes on, in a terminal
    "reproduce": {"listing"},
    "run": {"engine"},  # sets=["engine.kind=…"]
    "finish": {"run"},  # folder
    "resume": {"run"},
}


@pytest.mark.parametrize("verb", sorted(set(VERBS) - set(NO_TWIN)))
def test_options_of_a_verb_are_arguments_of_its_function(verb):
    command, function = inspect.signature(VERBS[verb]).parameters, inspect.signature(getattr(fl, verb)).parameters
    assert set(command) - set(function) - OF_THE_TERMINAL == OTHERWISE.get(verb, set())


def test_shared_arguments_have_one_meaning_everywhere():
    """Keyword-only, with one default wherever a function has them."""
    defaults: dict[str, set[str]] = {}
    for verb in set(VERBS) - set(NO_TWIN):
        for name, parameter in inspect.signature(getattr(fl, verb)).parameters.items():
            if (
                name in ("seed", "workers", "data_dir", "track", "sets", "extensions", "registries")
                and verb != "subnet"
            ):
                assert parameter.kind is parameter.KEYWORD_ONLY, (verb, name)
                defaults.setdefault(name, set()).add(repr(parameter.default))
    assert {name: len(values) for name, values in defaults.items()} == dict.fromkeys(defaults, 1)
