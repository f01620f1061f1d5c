"""Rules of the architecture that no linter knows."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedloom
from fedloom.methods import METHODS

SOURCE = Path(fedloom.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
METHOD_FILES = [path for path in (SOURCE / "methods").glob("*.py") if path.name not in ("__init__.py", "method.py")]
OF_METHODS = {kind.__module__.rpartition(".")[2] for kind in METHODS.values()}
SHARED_ROOMS = ("client", "fleet", "footprints", "evaluation")


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def calls(tree: ast.Module) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of everything a file imports; modules of the package in full, e.g. fedloom.client.fit."""
    package = ("fedloom", *path.relative_to(SOURCE).parts[:-1])
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)


def test_the_source_is_found() -> None:
    assert len(FILES) > 50
    assert {"fedavg.py", "heterofl.py"} <= {path.name for path in METHOD_FILES}


def test_only_fit_steps_an_optimiser() -> None:
    """Every method trains through the one loop."""
    stepping = {
        name_of(path)
        for path in FILES
        if any(isinstance(call.func, ast.Attribute) and call.func.attr == "step" for call in calls(tree_of(path)))
    }
    assert stepping == {"client/fit.py"}


@pytest.mark.parametrize("path", METHOD_FILES, ids=name_of)
def test_no_method_imports_another(path: Path) -> None:
    names = {other.stem for other in METHOD_FILES if other != path and other.stem in OF_METHODS}
    others = {f"fedloom.methods.{name}" for name in names}
    for module, name in imported(path):
        assert module not in others
        assert not (module == "fedloom.methods" and (name in names or name == "METHODS"))


def public_functions(path: Path) -> Iterator[str]:
    for node in tree_of(path).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name


def users_of_shared_helpers() -> dict[tuple[str, str], set[str]]:
    """(room, function) -> the files that use it, its own included if it is called there."""
    used: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    homes = {
        (room, function): name_of(path)
        for room in SHARED_ROOMS
        for path in (SOURCE / room).glob("*.py")
        for function in public_functions(path)
    }
    for path in FILES:
        if path.name == "__init__.py":
            continue  # handing on is not using
        for module, name in imported(path):
            room = module.removeprefix("fedloom.").split(".")[0]
            if (room, name) in homes:
                used[room, name].add(name_of(path))
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                for room in SHARED_ROOMS:
                    if homes.get((room, node.id)) == name_of(path):
                        used[room, node.id].add(name_of(path))
    return {helper: used[helper] for helper in homes}


def test_helpers_are_found_where_they_are_used() -> None:
    """The check below would pass on nothing."""
    users = users_of_shared_helpers()
    assert {"methods/standalone.py", "methods/heterofl.py"} <= users["client", "fit"]
    assert "client/losses.py" in users["client", "cross_entropy"]


def test_a_helper_of_one_method_lives_in_that_methods_file() -> None:
    of_one_method = {
        helper: users
        for helper, users in users_of_shared_helpers().items()
        if len(users) == 1 and users <= {f"methods/{name}.py" for name in OF_METHODS}
    }
    places = {
        ("footprints", place) for place in ("leading", "centered", "rolling")
    }  # where a footprint lies: a set of values
    assert of_one_method.keys() <= places


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_prints_and_nothing_runs_text(path: Path) -> None:
    called = {call.func.id for call in calls(tree_of(path)) if isinstance(call.func, ast.Name)}
    assert called.isdisjoint({"print", "eval", "exec"})


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_is_pickled(path: Path) -> None:
    """Also not by torch: what is read from a file or a message must not be able to run."""
    roots = {module.split(".")[0] for module, _ in imported(path)}
    assert roots.isdisjoint({"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"})
    attributes = {
        (call.func.value.id, call.func.attr)
        for call in calls(tree_of(path))
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name)
    }
    assert attributes.isdisjoint({("torch", "load"), ("torch", "save")})


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_its_own_room_needs_flower(path: Path) -> None:
    """And nobody enters it unless a recipe asks for it."""
    if name_of(path).startswith("flower/"):
        return
    assert "flwr" not in {module.split(".")[0] for module, _ in imported(path)}
    at_once = [node for node in tree_of(path).body if isinstance(node, ast.ImportFrom)]
    assert not any("flower" in (node.module or "") for node in at_once)
