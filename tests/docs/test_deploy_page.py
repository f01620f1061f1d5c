"""The commands of docs/tutorials/fleet.md run a whole fleet on this machine, from creating keys to stopping it."""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest

from tests.real_fleet import read_lines

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorials" / "fleet.md"


@pytest.mark.slow
def test_deploy_page_commands_run_in_order_finish_a_run(tmp_path: Path) -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    script = ["set -e", *blocks]
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    shell = subprocess.Popen(["bash", "-c", "\n".join(script)], cwd=tmp_path, env=env, start_new_session=True)
    try:
        code = shell.wait(timeout=900)
    finally:
        with suppress(ProcessLookupError):  # a script that failed leaves devices behind
            os.killpg(shell.pid, signal.SIGKILL)
    assert code == 0, "\n".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert json.loads((tmp_path / "my-run" / "manifest.json").read_text())["status"] == "finished"
    recipe = tomllib.loads((tmp_path / "my-run" / "recipe.toml").read_text("utf-8"))
    assert recipe["fleet"]["device_tiers"] == ["large", "large", "medium", "medium", "small", "small"]
    participants = {
        name for line in read_lines(tmp_path / "my-run" / "participation.jsonl") for name in line["devices"]
    }
    assert participants == {"0", "1", "2", "3", "4", "5"}
    pidfiles = [*(tmp_path / "my-fleet").rglob("pidfile.json")]
    assert len(pidfiles) == 7 and all(json.loads(path.read_text())["pid"] == 0 for path in pidfiles)
