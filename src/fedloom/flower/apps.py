"""The two halves that Flower starts: one on every device, one at the server.

The app that Flower wants to see. There is nothing in it: fedloom itself is installed on every node.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from .client import ClientRuntime, carry
from .nodes import introduction

__all__ = ["APP", "ClientApp", "Config", "Grid", "ServerApp", "client_app", "server_app", "write_app"]

Config = Mapping[str, Any]
"""What whoever started a node, or a run, has said."""


def client_app(
    runtime_of: Callable[[Mapping[str, Any], Config], ClientRuntime], introduce: Callable[[Config], Config]
) -> ClientApp:
    """`runtime_of`: from a run's recipe and the node's configuration to what the device has; `introduce`: what it says of
    itself."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        answer = carry(message.content, lambda recipe: runtime_of(recipe, context.node_config))
        return Message(answer, reply_to=message)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return Message(introduction(**introduce(context.node_config)), reply_to=message)

    return app


def server_app(play: Callable[[Grid, Config], None]) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        play(grid, context.run_config)

    return app


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

from fedloom.deploy.apps import flower_client, flower_server

client = flower_client()
server = flower_server()
'''


def write_app(folder: Path, app: str = APP) -> Path:
    """The folder, as `flwr run` takes it; the settings of a run are its --run-config."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    (folder / f"{MODULE}.py").write_text(app, encoding="utf-8")
    return folder
