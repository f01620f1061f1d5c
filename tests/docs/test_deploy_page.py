"""docs/deploy.md, typed as it stands: a fleet on this machine, from keys to its end."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.real_fleet import lines

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "deploy.md"


@pytest.mark.slow
def test_the_page_brings_up_a_fleet(tmp_path: Path) -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    said = ["set -e", *blocks]
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    shell = subprocess.Popen(["bash", "-c", "\n".join(said)], cwd=tmp_path, env=env, start_new_session=True)
    try:
        assert shell.wait(timeout=900) == 0, "\n".join(path.read_text() for path in tmp_path.glob("*.log"))
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
    assert json.loads((tmp_path / "my-run" / "manifest.json").read_text())["status"] == "finished"
    given = 'device_tiers = ["large", "large", "medium", "medium", "small", "small"]'
    assert given in (tmp_path / "my-run" / "recipe.toml").read_text()
    heard = {name for line in lines(tmp_path / "my-run" / "participation.jsonl") for name in line["devices"]}
    assert heard == {"0", "1", "2", "3", "4", "5"}
    pidfiles = [*(tmp_path / "my-fleet").rglob("pidfile.json")]
    assert len(pidfiles) == 7 and all(json.loads(one.read_text())["pid"] == 0 for one in pidfiles)
