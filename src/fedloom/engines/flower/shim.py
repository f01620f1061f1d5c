"""The app that Flower wants to see. There is nothing in it: fedloom itself is installed on every node."""

from pathlib import Path

MODULE = "fedloom_app"

PROJECT = f"""[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedloom-app"
version = "1.0.0"
description = "Carries fedloom's parcels"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fedloom"

[tool.flwr.app.components]
serverapp = "{MODULE}:server"
clientapp = "{MODULE}:client"

[tool.flwr.app.config]
recipe = ""
out = ""
data-dir = ""
with = ""
fleet = ""
launch = ""
"""

APP = '''"""The two halves of a run, as fedloom has them."""

from fedloom.experiment.deployment.serving import flower_client, flower_server

client = flower_client()
server = flower_server()
'''


def write_app(folder: Path, app: str = APP) -> Path:
    """The folder, as `flwr run` takes it; the settings of a run are its --run-config."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    (folder / f"{MODULE}.py").write_text(app, encoding="utf-8")
    return folder
