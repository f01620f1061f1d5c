"""The two halves that Flower starts: one on every device, one at the server."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from .device import Home, carry
from .roster import introduction

__all__ = ["ClientApp", "Config", "Grid", "ServerApp", "client_app", "server_app"]

Config = Mapping[str, Any]
"""What whoever started a node, or a run, has said."""


def client_app(
    home_of: Callable[[Mapping[str, Any], Config], Home], introduce: Callable[[Config], Config]
) -> ClientApp:
    """`home_of`: from a run's recipe and the node's configuration to what the device has; `introduce`: what it says of
    itself."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        answer = carry(message.content, lambda recipe: home_of(recipe, context.node_config))
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
