"""Every method runs with every codec, with the same bits in process and by messages, and with fewer bytes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedloom.engines import Compression
from fedloom.engines.compression import HalfPrecision, Int8, LowRank
from fedloom.methods import Method
from fedloom.testing.methods import SPARSE_UPLINK, check_compression

SIZES = (8, 5)
LABELS = [[0, 1], [0, 1, 2, 3]]
CODECS = {
    "float16": Compression(HalfPrecision(torch.float16), HalfPrecision(torch.float16)),
    "int8": Compression(Int8(), Int8()),
    "top_k": SPARSE_UPLINK,
    "low_rank": Compression(LowRank(0.25)),
}


@pytest.mark.parametrize(
    "codec",
    [pytest.param(one, id=name, marks=[] if name == "top_k" else [pytest.mark.slow]) for name, one in CODECS.items()],
)
def test_method_with_every_codec_runs(codec: Compression, method: Method, world_for: Callable[..., Any]) -> None:
    check_compression(method, world_for(method, None, sizes=SIZES, labels=LABELS), codec)
