"""Rules of the architecture that no linter knows."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import fedloom
from fedloom.methods import METHODS

SOURCE = Path(fedloom.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
METHOD_FILES = [path for path in (SOURCE / "methods").glob("*.py") if path.name not in ("__init__.py", "method.py")]
METHOD_MODULES = {kind.__module__.rpartition(".")[2] for kind in METHODS.values()}
SHARED_FOLDERS = ("client", "fleet", "footprints", "evaluation")
ENGINES = {"InProcess", "Flower", "DryRun", "WorkerPool", "Lockstep", "InlineExecutor", "CompositeEngine"}
RETIRED = re.compile(
    r"\b(said|told|whom|whoever|nobody|errand|seat|convoy|diary|homes|knocking|at_ease|company)\b", re.IGNORECASE
)


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


@cache
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


def test_source_files_are_found() -> None:
    assert len(FILES) > 50
    assert {"fedavg.py", "heterofl.py"} <= {path.name for path in METHOD_FILES}


def test_optimizer_step_is_called_in_fit_only() -> None:
    """Every method trains through the one loop."""
    stepping = {
        name_of(path)
        for path in FILES
        if any(isinstance(call.func, ast.Attribute) and call.func.attr == "step" for call in calls(tree_of(path)))
    }
    assert stepping == {"client/fit.py"}


def test_method_file_imports_no_other_method() -> None:
    for path in METHOD_FILES:
        names = {other.stem for other in METHOD_FILES if other != path and other.stem in METHOD_MODULES}
        others = {f"fedloom.methods.{name}" for name in names}
        for module, name in imported(path):
            assert module not in others, name_of(path)
            assert not (module == "fedloom.methods" and (name in names or name == "METHODS")), name_of(path)


def public_functions(path: Path) -> Iterator[str]:
    for node in tree_of(path).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name


def users_of_shared_helpers() -> dict[tuple[str, str], set[str]]:
    """(folder, function) -> the files that use it, its own included if it is called there."""
    used: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    defined_in = {
        (folder, function): name_of(path)
        for folder in SHARED_FOLDERS
        for path in (SOURCE / folder).glob("*.py")
        for function in public_functions(path)
    }
    for path in FILES:
        if path.name == "__init__.py":
            continue  # a re-export is no use
        for module, name in imported(path):
            folder = module.removeprefix("fedloom.").split(".")[0]
            if (folder, name) in defined_in:
                used[folder, name].add(name_of(path))
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                for folder in SHARED_FOLDERS:
                    if defined_in.get((folder, node.id)) == name_of(path):
                        used[folder, node.id].add(name_of(path))
    return {helper: used[helper] for helper in defined_in}


def test_users_of_shared_helpers_are_found() -> None:
    """The next test would pass on nothing."""
    users = users_of_shared_helpers()
    assert {"methods/standalone.py", "methods/heterofl.py"} <= users["client", "fit"]
    assert "client/losses.py" in users["client", "supervised_loss"]


def test_helper_of_one_method_is_in_its_file() -> None:
    of_one_method = {
        helper
        for helper, users in users_of_shared_helpers().items()
        if len(users) == 1 and users <= {f"methods/{name}.py" for name in METHOD_MODULES}
    }
    assert of_one_method <= {("footprints", slicer) for slicer in ("leading", "centered", "rolling")}  # a set of values


def test_source_calls_no_print_eval_or_exec() -> None:
    for path in FILES:
        called = {call.func.id for call in calls(tree_of(path)) if isinstance(call.func, ast.Name)}
        assert called.isdisjoint({"print", "eval", "exec"}), name_of(path)


def test_source_uses_no_pickle() -> None:
    """Not by torch either: what is read from a file or a message must not be able to run."""
    for path in FILES:
        roots = {module.split(".")[0] for module, _ in imported(path)}
        assert roots.isdisjoint({"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}), name_of(path)
        attributes = {
            (call.func.value.id, call.func.attr)
            for call in calls(tree_of(path))
            if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name)
        }
        assert attributes.isdisjoint({("torch", "load"), ("torch", "save")}), name_of(path)


def test_flwr_is_imported_in_flower_folder_only() -> None:
    """And that folder is imported when a recipe or a command asks for it, not with the package."""
    for path in FILES:
        if name_of(path).startswith("flower/"):
            continue
        assert "flwr" not in {module.split(".")[0] for module, _ in imported(path)}, name_of(path)
        if not name_of(path).startswith("deploy/"):
            at_import = [node for node in tree_of(path).body if isinstance(node, ast.ImportFrom)]
            assert not any("flower" in (node.module or "") for node in at_import), name_of(path)


def test_engines_are_not_told_apart_by_class() -> None:
    """Nor is anything cast to one."""
    for path in FILES:
        for call in calls(tree_of(path)):
            if isinstance(call.func, ast.Name) and call.func.id in ("isinstance", "cast"):
                names = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
                assert names.isdisjoint(ENGINES), f"{name_of(path)}:{call.lineno}"


def test_public_type_names_are_defined_once() -> None:
    defined: defaultdict[str, set[str]] = defaultdict(set)
    for path in FILES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined[node.name].add(name_of(path))
    assert {name: files for name, files in defined.items() if len(files) > 1} == {}


def test_source_uses_no_retired_word() -> None:
    found = {name_of(path): RETIRED.findall(path.read_text(encoding="utf-8")) for path in FILES}
    assert {name: words for name, words in found.items() if words} == {}


def test_strings_in_source_import_nothing() -> None:
    """Source text that imports the package would pass by the check of the layers."""
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not re.search(r"^\s*(from fedloom[\w.]* import|import fedloom)", node.value, re.MULTILINE) or (
                    name_of(path) in ALLOWED_SOURCE_TEXT
                ), f"{name_of(path)}:{node.lineno}"


ALLOWED_SOURCE_TEXT = {"exporting/card.py"}  # model cards show users how to load a file
