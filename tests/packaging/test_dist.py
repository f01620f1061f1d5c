"""Wheel and sdist: what they contain, and that the wheel works in a fresh environment far from the repository.

`FEDLOOM_DIST` names a folder with both (`make dist` checks what it has just built); otherwise they are built here.
"""

import json
import os
import shlex
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import pytest

import fedloom

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "fedloom"
UNWANTED = {
    "runs",
    "artefacts",
    "site",
    "dist",
    ".git",
    ".venv",
    ".hypothesis",
    "__pycache__",
    ".ruff_cache",
    ".mypy_cache",
}

pytestmark = pytest.mark.slow

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if given := os.environ.get("FEDLOOM_DIST"):
        return (ROOT / given).resolve()
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("fedloom-*.whl")
    return path


@pytest.fixture(scope="module")
def sdist(dist: Path) -> Path:
    (path,) = dist.glob("fedloom-*.tar.gz")
    return path


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment with the wheel and what it depends on; pip gets torch as `make setup` does."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    install = [str(folder / "bin" / "pip"), "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    for wanted in (shlex.split(os.environ.get("TORCH", "torch")), [str(wheel)]):
        done = subprocess.run(
            [*install, *wanted], capture_output=True, text=True, timeout=1200, check=False, cwd=folder
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def run(environment: Path, tmp_path: Path) -> Run:
    """Run a program of the fresh environment in an empty folder, at 80 columns."""
    private = ("PYTHON", "FEDLOOM", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(private)}
    variables = {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "80", "TERM": "dumb"}

    def run_program(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(environment / "bin" / program), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path, env=variables
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run_program


def test_wheel_contains_the_whole_package_and_nothing_else(wheel: Path) -> None:
    """Bundled data, demo recipe, templates and py.typed included; no tests, no caches."""
    expected = {
        f"fedloom/{path.relative_to(PACKAGE).as_posix()}"
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    assert names == expected
    needed = {
        "py.typed",
        "recipe/demo.toml",
        "recipe/starter.toml",
        "reporting/page.html",
        "reporting/page.css",
        "reporting/page.js",
    }
    needed |= {"data/bundled/digits.npz", "data/bundled/fashion_mini.npz", "data/bundled/LICENSES.txt"}
    assert {f"fedloom/{name}" for name in needed} <= names


def test_wheel_metadata_has_version_license_and_command(wheel: Path) -> None:
    information = f"fedloom-{fedloom.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as file:
        metadata = Parser().parsestr(file.read(f"{information}/METADATA").decode())
        commands = file.read(f"{information}/entry_points.txt").decode()
        licenses = {name for name in file.namelist() if name.startswith(f"{information}/licenses/")}
    assert (metadata["Version"], metadata["License-Expression"]) == (fedloom.__version__, "Apache-2.0")
    assert metadata["Requires-Python"] == ">=3.11"
    assert {Path(name).name for name in licenses} == {"LICENSE", "LICENSES.txt"}
    assert "fedloom = fedloom.cli.app:main" in commands


def test_sdist_contains_sources_but_no_runs_artefacts_or_caches(sdist: Path) -> None:
    with tarfile.open(sdist) as file:
        paths = [Path(*Path(name).parts[1:]) for name in file.getnames()]
    folders = {part for path in paths for part in path.parts[:1]}
    assert not UNWANTED & folders
    assert not {"__pycache__", ".ipynb_checkpoints"} & {part for path in paths for part in path.parts}
    names = {path.as_posix() for path in paths}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt"} <= names
    assert {"src/fedloom/__init__.py", "tests/packaging/test_dist.py", "recipes/demo.toml", "docs/index.md"} <= names
    assert sdist.stat().st_size < 10e6


def test_installed_wheel_without_the_repository_runs_the_demo_and_the_first_tutorial(
    run: Run, environment: Path, tmp_path: Path
) -> None:
    """One test, so that one environment is made. The demo is the whole one: bundled images, three arms, a report."""
    assert run("fedloom", "--version").stdout.strip() == fedloom.__version__
    imported = run("python", "-c", "import fedloom; print(fedloom.__file__)").stdout.strip()
    assert Path(imported).is_relative_to(environment)

    listed = json.loads(run("fedloom", "list", "methods", "--format", "json").stdout)["data"]
    assert {"heterofl", "fedavg", "fedsup"} <= {method["name"] for method in listed}
    lines = run("fedloom", "list", "methods").stdout.splitlines()
    assert any("heterofl" in line for line in lines)
    assert [line for line in lines if len(line) > 80] == []

    result = json.loads(run("fedloom", "run", "--format", "json").stdout)
    assert result["status"] == "ok"
    folder = tmp_path / result["data"]["run"]
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    assert (manifest["status"], manifest["fedloom"]) == ("finished", fedloom.__version__)
    assert {path.stem for path in (folder / "models").glob("*.safetensors")} == {"large", "medium", "small"}
    (report,) = (tmp_path / "runs").glob("*/report.html")
    assert "everytier" in report.read_text("utf-8")

    cells = json.loads((ROOT / "docs/tutorials/first_run.ipynb").read_text("utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 3
    (tmp_path / "first_run.py").write_text("\n\n".join(code), encoding="utf-8")
    run("python", "first_run.py")
