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

from ..engines.client_state import ClientStateStore
from ..engines.compression import Compression, DeviceEnd
from ..engines.in_process import InProcess, Job, make_blocks, run_block
from ..engines.protocol import Expected
from ..engines.task_ref import FindTask, device_from_json, task_from_json
from ..fleet import Channel, Device, Fleet, Reply, Request
from ..tensors import Parcel, all_finite, split
from .client_state import SavedState, Version, open_state_files
from .messages import DTYPES, decode_request, encode_refusal, encode_reply
from .nodes import encode_device_info
from .versions import VERSION_KEY, explain_versions, is_compatible

__all__ = ["ClientApp", "ClientRuntime", "Config", "Grid", "ServerApp", "client_app", "handle_request", "server_app"]

Config = Mapping[str, Any]
"""Flower's configuration of a node or of a run."""


class OtherVersion(Exception):  # noqa: N818 - named for what is wrong
    """The server's version of fedloom is not compatible with the device's."""


@dataclass(frozen=True)
class ClientRuntime:
    """A device's data with the recipe's training settings, and the folder of its state."""

    name: str
    engine: InProcess
    fleet: Fleet
    find: FindTask
    folder: Path
    compression: Compression | None = None


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
    if not is_compatible(header.get(VERSION_KEY)):  # first: everything else may have another meaning
        raise OtherVersion(explain_versions(header.get(VERSION_KEY), is_server=False))
    with _precision(header["precision"]):
        runtime = build_runtime(header["recipe"])
        task, device = task_from_json(header, runtime.find), device_from_json(header["device"], runtime.fleet)
        request = Request(task, {device: inbox}, header["round"], header["repeat"])
        return _reply(request, device, runtime, header)


def _reply(request: Request, device: Device, runtime: ClientRuntime, header: Mapping[str, Any]) -> RecordDict:
    expected = Expected(header["run"], request.round_number, request.repeat, request.task, device, {})
    if device.name != runtime.name:
        return encode_refusal(expected.header(1), "STALE", f"this is device {runtime.name}")
    reply_header = expected.header(runtime.engine.client_data.count(device))
    files = open_state_files(runtime.folder, header["run"], device.name)
    use, write, since = (_version(header["state"][name]) for name in ("use", "write", "since"))
    before = files.read(use) if use else SavedState(None, {})
    if before is None:
        return encode_refusal(reply_header, "STATE_LOST", f"its state of round {use and use[0]} is missing")
    state = runtime.engine.client_states.initial(device) if before.task is None else before.task
    compression = runtime.compression if header["compressed"] else None
    ends = (DeviceEnd(compression, lambda device: before.residual),) if compression else ()
    reply = _run_alone(replace(request, transports=ends), device, runtime.engine, state)
    if reply.state is not None and not all(all_finite(tensors.values()) for tensors in reply.state.values()):
        return encode_refusal(reply_header, "NONFINITE", "the new client state is not finite")
    residual = before.residual if reply.residual is None else reply.residual
    has_changed = reply.state is not None or reply.residual is not None
    if has_changed and write:
        files.write(write, SavedState(before.task if reply.state is None else reply.state, residual))
    if since:
        files.delete_before(since)
    return encode_reply(reply_header, reply.upload, has_changed)


def _run_alone(request: Request, device: Device, engine: InProcess, state: Parcel) -> Reply:
    """The reply of a block with this device alone; its random draws do not depend on the block."""
    channel = Channel(request, {"device"})
    engine = replace(engine, client_states=ClientStateStore(lambda device: state))
    job = Job(engine, replace(request, inboxes=channel.deliver(request.inboxes)))
    (block,) = make_blocks([job])
    result = run_block(block)
    new_state = None if result.state is None else split(result.state, 0)
    reply = channel.upload(Reply(device, engine.client_data.count(device), split(result.upload, 0), new_state))
    assert reply is not None  # the device's own transports lose nothing
    return reply


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
