"""Measured block sizes end up in the recipe, and nothing else in it changes."""

import tomllib

import pytest

from fedloom.analysis.profiling import BLOCK_SIZES, BlockTiming, set_devices_per_block
from fedloom.cli.app import main
from fedloom.recipe.load import load
from fedloom.recipe.registry import Registry

MEASURED = [BlockTiming("a", {1: 2.0, 2: 1.0}, 2), BlockTiming("b", {1: 1.0, 2: 1.0}, 1)]


@pytest.mark.parametrize(
    "text",
    [
        "rounds = 1 # once\n",
        "rounds = 1\n[engine]\nkind = 'in_process'\n[method]\nname = 'x'\n",
        "rounds = 1\n\n[engine]\ndevices_per_block = { a = 16 }\nkind = 'in_process'\n",
        "rounds = 1\n\n[engine]\ndevices_per_block = 3\n",
    ],
    ids=["no engine", "an engine", "numbers per tier", "one number"],
)
def test_a_text_keeps_everything_else(text: str) -> None:
    before, after = tomllib.loads(text), tomllib.loads(set_devices_per_block(text, MEASURED))
    assert after["engine"].pop("devices_per_block") == {"a": 2, "b": 1}
    before.setdefault("engine", {}).pop("devices_per_block", None)
    assert after == before
    assert set_devices_per_block(set_devices_per_block(text, MEASURED), MEASURED) == set_devices_per_block(
        text, MEASURED
    )


def test_the_command_writes_a_recipe_that_still_runs(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text(
        "rounds = 1\n[data]\ndataset = 'digits'\ndevices = 4\n[model]\nhidden = [2, 3]\n"
        "[[tiers]]\nname = 'all'\nshare = 1.0\n[method]\nname = 'fedavg'\n"
    )
    with pytest.raises(SystemExit) as done:
        main(["calibrate", "my.toml", "--write"])
    assert done.value.code == 0
    assert "written: my.toml" in capsys.readouterr().out
    assert load("my.toml", Registry()).recipe.engine.devices_per_block["all"] in BLOCK_SIZES
