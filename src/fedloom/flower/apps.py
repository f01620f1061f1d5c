"""The two apps that Flower starts. The client app executes the server's requests on a device, exactly as a simulation
would; the server app passes Flower's grid to a function."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from ..engines.blocks import Request, make_blocks, run_block
from ..engines.client_state import ClientStateStore
from ..engines.compression import Codec
from ..engines.in_process import InProcess
from ..engines.protocol import Question
from ..engines.serialization import Find, device_from_words, task_from_words
from ..fleet import Fleet
from ..tensors import Parcel, all_finite, split
from .client_state import SavedState, Version, open_state_files
from .messages import DTYPES, decode_request, encode_refusal, encode_reply
from .nodes import encode_device_info

__all__ = ["ClientApp", "ClientRuntime", "Config", "Grid", "ServerApp", "client_app", "handle_request", "server_app"]

Config = Mapping[str, Any]
"""Flower's configuration of a node or of a run."""


@dataclass(frozen=True)
class ClientRuntime:
    """A device's data with the recipe's training settings, and the folder of its state."""

    name: str
    engine: InProcess
    fleet: Fleet
    find: Find
    folder: Path
    codec: Codec | None = None  # compression of messages


def client_app(
    build_runtime: Callable[[Mapping[str, Any], Config], ClientRuntime], describe: Callable[[Config], Config]
) -> ClientApp:
    """A client app.

    Parameters
    ----------
    build_runtime
        From a run's recipe (as JSON) and the node's configuration to the device's runtime.
    describe
        From the node's configuration to what the device reports about itself.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        reply = handle_request(message.content, lambda recipe: build_runtime(recipe, context.node_config))
        return Message(reply, reply_to=message)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return Message(encode_device_info(describe(context.node_config)), reply_to=message)

    return app


def server_app(serve: Callable[[Grid, Config], None]) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(grid, context.run_config)

    return app


def handle_request(content: RecordDict, build_runtime: Callable[[Mapping[str, Any]], ClientRuntime]) -> RecordDict:
    """Execute a request and encode the reply. Flower reports exceptions to the server."""
    header, inbox = decode_request(content)
    with _precision(header["precision"]):
        runtime = build_runtime(header["recipe"])
        task, device = task_from_words(header, runtime.find), device_from_words(header["device"], runtime.fleet)
        codec = runtime.codec if header["coded"] else None
        delivered = codec.decode_down(inbox) if codec else inbox
        question = Question(header["run"], header["round"], header["repeat"], task, device, delivered)
        return _reply(question, runtime, codec, header["memory"])


def _reply(question: Question, runtime: ClientRuntime, codec: Codec | None, versions: Mapping[str, Any]) -> RecordDict:
    device, files = question.device, open_state_files(runtime.folder, question.run, question.device.name)
    if device.name != runtime.name:
        return encode_refusal(question.heading(1), "STALE", f"this is device {runtime.name}")
    heading = question.heading(runtime.engine.client_data.count(device))
    use, write, since = (_version(versions[name]) for name in ("use", "write", "since"))
    before = files.read(use) if use else SavedState(None, {})
    if before is None:
        return encode_refusal(heading, "MEMORY_LOST", f"its state of round {use and use[0]} is missing")
    state = runtime.engine.memory.prepare(device) if before.task is None else before.task
    upload, new_state = _run_alone(question, runtime.engine, state)
    if new_state is not None and not all(all_finite(tensors.values()) for tensors in new_state.values()):
        return encode_refusal(heading, "NONFINITE", "the new client state is not finite")
    residual = before.residual
    if codec:
        upload, residual = codec.encode_up(question.task, question.inbox, upload, residual)
    has_changed = new_state is not None or residual is not before.residual
    if has_changed and write:
        files.write(write, SavedState(before.task if new_state is None else new_state, residual))
    if since:
        files.delete_before(since)
    return encode_reply(heading, upload, has_changed)


def _run_alone(question: Question, engine: InProcess, state: Parcel) -> tuple[Parcel, Parcel | None]:
    """Upload and new state of a block with this device alone; its random draws do not depend on the block."""
    engine = replace(engine, memory=ClientStateStore(lambda device: state))
    request = Request(engine, question.task, {question.device: question.inbox}, question.round_number, question.repeat)
    (block,) = make_blocks([request])
    result = run_block(block)
    return split(result.upload, 0), None if result.state is None else split(result.state, 0)


def _version(numbers: list[int] | None) -> Version | None:
    return (numbers[0], numbers[1]) if numbers else None


@contextmanager
def _precision(name: str) -> Iterator[None]:
    """Use the server's default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[name])
    try:
        yield
    finally:
        torch.set_default_dtype(before)
