"""Multiply-adds of whatever runs in a forward pass: against counts by hand and against torch's FLOP counter."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fedloom.models import Model, build_model, compute_cost
from fedloom.models.cost import log_uncounted

TOKENS, SIZE, HEADS, CLASSES = 5, 8, 2, 3
ATTENTION = 4 * TOKENS * SIZE * SIZE + 2 * TOKENS * TOKENS * SIZE  # four projections; scores, and their mean of values


class Einsum(nn.Module):
    """No layer at all: what counted by layer was zero."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(TOKENS, TOKENS))
        self.channels = nn.Parameter(torch.randn(SIZE, SIZE))
        self.out = nn.Parameter(torch.randn(CLASSES, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.einsum("btc,ts->bsc", x, self.mix) @ self.channels
        return F.linear(x.mean(1), self.out)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(SIZE, HEADS, batch_first=True)
        self.out = nn.Linear(SIZE, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attention(x, x, x, need_weights=False)[0].mean(1))  # type: ignore[no-any-return]


class FrozenAttention(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.attention.requires_grad_(False)


class FusedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values, self.mix = (nn.Linear(SIZE, SIZE) for _ in range(4))
        self.out = nn.Linear(SIZE, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        projected = (layer(x).unflatten(-1, (HEADS, -1)) for layer in (self.queries, self.keys, self.values))
        q, k, v = (each.transpose(1, 2) for each in projected)
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        return self.out(self.mix(x).mean(1))  # type: ignore[no-any-return]


class Signal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv1d(TOKENS, 4, 3, stride=2, padding=1), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.conv(x)).mean(-1))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """Of two layers in both directions."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells = kind(SIZE, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cells(x)[0][:, -1])  # type: ignore[no-any-return]


def lstm() -> nn.Module:
    return Recurrent(nn.LSTM)


def gru() -> nn.Module:
    return Recurrent(nn.GRU)


class LoRA(nn.Module):
    def __init__(self, rank: int = 4) -> None:
        super().__init__()
        self.base, self.out = nn.Linear(SIZE, SIZE).requires_grad_(False), nn.Linear(SIZE, CLASSES)
        self.down, self.up = nn.Parameter(torch.randn(rank, SIZE)), nn.Parameter(torch.zeros(SIZE, rank))

    def forward(self, x: Tensor) -> Tensor:
        x = x.mean(1)
        return self.out(self.base(x) + x @ self.down.mT @ self.up.mT)  # type: ignore[no-any-return]


class Tied(nn.Module):
    """One weight in two layers, one layer called twice: each use counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, SIZE, bias=False), nn.Linear(SIZE, SIZE, bias=False)
        self.second.weight, self.out = self.first.weight, nn.Linear(SIZE, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.first(self.first(x.mean(1)))))  # type: ignore[no-any-return]


class Vectors(nn.Module):
    """A product with a vector, which torch's counter does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Parameter(torch.randn(SIZE)), nn.Linear(TOKENS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x @ self.query)  # type: ignore[no-any-return]


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.ConvTranspose1d(TOKENS, 4, 2, stride=2), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.conv(x).mean(-1))  # type: ignore[no-any-return]


COUNTS: dict[Callable[[], nn.Module], int] = {
    Einsum: TOKENS * TOKENS * SIZE + TOKENS * SIZE * SIZE + SIZE * CLASSES,
    Attention: ATTENTION + SIZE * CLASSES,
    FrozenAttention: ATTENTION + SIZE * CLASSES,
    FusedAttention: ATTENTION + SIZE * CLASSES,
    Signal: 4 * 4 * TOKENS * 3 + 4 * CLASSES,
    lstm: TOKENS * 2 * 4 * 6 * ((SIZE + 6) + (12 + 6)) + 12 * CLASSES,
    gru: TOKENS * 2 * 3 * 6 * ((SIZE + 6) + (12 + 6)) + 12 * CLASSES,
    LoRA: SIZE * SIZE + 2 * 4 * SIZE + SIZE * CLASSES,
    Tied: 3 * SIZE * SIZE + SIZE * CLASSES,
    Vectors: TOKENS * SIZE + TOKENS * CLASSES,
    Transposed: TOKENS * SIZE * 4 * 2 + 4 * CLASSES,
}
UNKNOWN_TO_TORCH = {Vectors}


def model_of(build: Callable[..., nn.Module]) -> Model:
    return build_model(build.__name__, build, {}, (TOKENS, SIZE), CLASSES)


@contextmanager
def unfused() -> Iterator[None]:
    """Attention and LSTMs as the products that they consist of: torch's counter knows no fused ones on a CPU."""
    was_fast, was_enabled = torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    torch._C._set_mkldnn_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_fast)
        torch._C._set_mkldnn_enabled(was_enabled)


@pytest.mark.parametrize("build", COUNTS)
def test_macs_of_any_module_match_hand_count(build: Callable[[], nn.Module]) -> None:
    cost = compute_cost(model_of(build))
    assert (cost.macs, cost.uncounted) == (COUNTS[build], ())


@pytest.mark.parametrize("build", [build for build in COUNTS if build not in UNKNOWN_TO_TORCH])
def test_macs_of_any_module_are_half_of_torch_flops(build: Callable[[], nn.Module]) -> None:
    net = model_of(build)
    module, inputs = net.module().eval(), net.zero_inputs(1)  # may run the net to look at it
    with unfused(), FlopCounterMode(display=False) as counter, torch.no_grad():
        module(inputs)
    assert compute_cost(net).macs * 2 == counter.get_total_flops()


def test_macs_grow_with_rank_of_adapters() -> None:
    ranks = [build_model("lora", LoRA, {"rank": rank}, (TOKENS, SIZE), CLASSES) for rank in (1, 4, 16)]
    assert [compute_cost(net).macs - SIZE * (SIZE + CLASSES) for net in ranks] == [
        2 * SIZE * rank for rank in (1, 4, 16)
    ]


def test_parameters_of_frozen_base_are_counted_apart() -> None:
    cost, base, rest = compute_cost(model_of(LoRA)), SIZE * SIZE + SIZE, SIZE * CLASSES + CLASSES + 2 * 4 * SIZE
    assert (cost.parameters, cost.frozen_parameters, cost.trained_parameters) == (base + rest, base, rest)


def test_tied_weight_is_one_parameter() -> None:
    assert compute_cost(model_of(Tied)).parameters == SIZE * SIZE + SIZE * CLASSES + CLASSES


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(SIZE, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.fft.fft(x).real.mean(1))  # type: ignore[no-any-return]


def test_operation_without_formula_is_named() -> None:
    cost = compute_cost(model_of(Fourier))
    assert (cost.macs, cost.uncounted) == (SIZE * CLASSES, ("aten._fft_r2c",))


class Free(nn.Module):
    """Norms, activations, pooling, interpolation, indexing: none of them is a product of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.Sequential(
            nn.LayerNorm(SIZE), nn.GroupNorm(1, TOKENS), nn.BatchNorm1d(TOKENS), nn.RMSNorm(SIZE)
        )
        self.slopes, self.table = nn.PReLU(), nn.Embedding(4, SIZE)
        self.out = nn.Linear(SIZE, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.slopes(F.hardswish(F.gelu(self.norms(x)).softmax(-1))) + self.table(x.argmax(-1) % 4)
        x = F.interpolate(F.max_pool1d(F.avg_pool1d(x, 2), 2), SIZE, mode="linear")
        x = F.glu(F.pad(torch.cat([x, x.roll(1, -1).flip(-1)], -1), (1, 1))[..., 1:-1]).cumsum(1)
        return self.out(x.clamp(min=0).sort(-1).values.amax(1))  # type: ignore[no-any-return]


def test_operations_without_products_count_nothing() -> None:
    cost = compute_cost(model_of(Free))
    assert (cost.macs, cost.uncounted) == (SIZE * CLASSES, ())


class Declared(nn.Module):
    """A layer that says what it costs, around one that is counted as it runs."""

    macs_per_output = 7

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(SIZE, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x.mT @ x).mean(1))  # type: ignore[no-any-return]


def test_declared_macs_replace_those_of_layer_itself() -> None:
    assert compute_cost(model_of(Declared)).macs == 7 * CLASSES + SIZE * CLASSES


def test_counting_leaves_modules_of_other_threads_alone() -> None:
    """Nothing is hooked or switched for the whole process, where other threads may train."""
    seen = []

    class Looking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((len(nn.modules.module._global_forward_hooks), torch.backends.mha.get_fastpath_enabled()))
            return super().forward(x.mean(1))

    before = (len(nn.modules.module._global_forward_hooks), torch.backends.mha.get_fastpath_enabled())
    compute_cost(build_model("looking", lambda: Looking(SIZE, CLASSES), {}, (TOKENS, SIZE), CLASSES))
    assert set(seen) == {before}


def test_uncounted_operations_are_logged_once_by_name(caplog: pytest.LogCaptureFixture) -> None:
    log_uncounted([model_of(Einsum)], "seconds")
    assert caplog.messages == []
    log_uncounted([model_of(Fourier), model_of(Einsum)], "seconds")
    assert caplog.messages == ["seconds leave out aten._fft_r2c, whose multiply-adds are not known"]
