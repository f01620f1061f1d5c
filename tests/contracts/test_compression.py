"""Every method runs with every codec, with the same bits in process and by messages, and with fewer bytes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedloom.engines import BytesTransport, Compression
from fedloom.engines.compression import HalfPrecision, Int8, TopK
from fedloom.fleet import Traffic
from fedloom.methods import Method
from fedloom.tensors import all_finite, fingerprint
from tests.conftest import with_compression

SIZES = (8, 5)
LABELS = [[0, 1], [0, 1, 2, 3]]
CODECS = {
    "float16": Compression(HalfPrecision(torch.float16), HalfPrecision(torch.float16)),
    "int8": Compression(Int8(), Int8()),
    "top_k": Compression(TopK(0.1), HalfPrecision(torch.bfloat16)),
}


def played(sim: Any, method: Method, inner: Any, engine: Any, codec: Compression) -> tuple[list[str], list[Traffic]]:
    """The fingerprints and the traffic of two rounds."""
    server, moved = method.start(sim.fleet, sim.seed), []
    for number in (1, 2):
        context = replace(sim.context(engine, number), wire=codec)
        server = method.round(server, context)
        engine.commit(number)
        moved.append(context.traffic)
    assert sim.refusals == []
    assert all(all_finite(tensors.values()) for tensors in server.values())
    held = inner.client_states.committed
    return [fingerprint(server), *(f"{name} {fingerprint(held[name])}" for name in sorted(held))], moved


@pytest.mark.parametrize(
    "codec",
    [pytest.param(one, id=name, marks=[] if name == "top_k" else [pytest.mark.slow]) for name, one in CODECS.items()],
)
def test_method_with_every_codec_runs(codec: Compression, method: Method, world_for: Callable[..., Any]) -> None:
    sim = world_for(method, None, sizes=SIZES, labels=LABELS)
    engine = sim.engine(method)
    prints, moved = played(sim, method, engine, with_compression(engine, codec), codec)
    for traffic in moved:
        assert traffic.compressed_bytes_down <= traffic.bytes_down
        assert traffic.compressed_bytes_up <= traffic.bytes_up
        assert sum(traffic.compressed_by_device.values()) == traffic.compressed_bytes_down + traffic.compressed_bytes_up
        assert sum(traffic.bytes_by_device.values()) == traffic.bytes_down + traffic.bytes_up
    if codec == CODECS["top_k"]:
        other = sim.engine(method)
        network = BytesTransport(encoded_task=codec.encoded_task, report=other.gate.report)
        assert played(sim, method, other, with_compression(other, codec, network), codec)[0] == prints
