"""The examples run, are short, and there is one for everything that can be one's own."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
WANTED = {
    "compare_methods", "custom_aggregation", "custom_metric", "custom_partition", "custom_tracker", "early_stop",
    "fedproto", "own_data", "own_model", "scaffold",
}  # fmt: skip
METHODS = {"fedproto", "scaffold"}
"""Both halves of an algorithm: as long as a paper's box, its settings and a run."""


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_without_error(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They assert what they show; names that they register are removed again."""
    import fedloom as fl

    tables = [fl.partitions, fl.aggregation]
    before = [dict(table._entries) for table in tables]
    monkeypatch.chdir(tmp_path)
    try:
        runpy.run_path(str(example), run_name="__main__")
    finally:
        for table, entries in zip(tables, before, strict=True):
            table._entries.clear()
            table._entries.update(entries)
    assert capsys.readouterr().out.strip()
    assert not any(tmp_path.iterdir()), "an example leaves files behind"


def test_examples_are_complete_and_short() -> None:
    assert {path.stem for path in EXAMPLES} >= WANTED
    lengths = {path.stem: len(path.read_text("utf-8").splitlines()) for path in EXAMPLES}
    assert all(length < (100 if name in METHODS else 60) for name, length in lengths.items())
