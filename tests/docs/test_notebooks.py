"""The notebooks run from top to bottom in a real kernel, and are stored without outputs."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs").rglob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_in_kernel_runs_without_error(notebook: Path, tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    cells = nbformat.read(notebook, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(cells, timeout=120, kernel_name="python3", resources=resources).execute()
    code = [cell for cell in cells.cells if cell.cell_type == "code"]
    assert len(code) > 3 and all(cell.execution_count for cell in code)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_outputs_are_empty(notebook: Path) -> None:
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    assert cells and not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
