"""HeteroFL on text compared with values worked out by hand: model, aggregation and evaluation."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom.client import Constant, Schedule, Sgd
from fedloom.data import Dataset, Examples, Partition, Preparation
from fedloom.engines import ClientStateStore, InProcess, build_client_data
from fedloom.evaluation import BatchNormStatistics, Evaluator
from fedloom.fleet import DeviceModel, Fleet, Reply, Request, make_nested_tiers, tier_slices
from fedloom.methods.heterofl import HeteroFL
from fedloom.models import MODELS, Model, build_model


def language_net(embedding: int, width: float) -> Model:
    sizes = {"embedding": embedding, "heads": 2, "hidden": 4, "layers": 1, "dropout": 0.0, "width": width}
    return build_model("transformer", MODELS["transformer"], sizes, (2,), 3, 4)


def into_heads(rows: list[list[float]]) -> Tensor:
    """A matrix of the paper, with the outputs of one head after the other, in the model's layout."""
    return torch.tensor(rows).view(2, -1, len(rows)).permute(1, 2, 0)


def out_of_heads(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows).view(len(rows), 2, -1).permute(0, 2, 1)


def narrow_attention(embedding: int, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The half-width slice of these weights; all other weights are zero."""
    tiers = make_nested_tiers([("a", language_net(embedding, 1.0)), ("b", language_net(embedding, 0.5))])
    whole = {name: torch.zeros(shape) for name, shape in tiers[0].model.shapes().items()}
    prefix = "layers.0.attention."
    part = tiers[1].footprint.read({**whole, **{prefix + name: one for name, one in weights.items()}})
    return {name.removeprefix(prefix): one for name, one in part.items() if name.startswith(prefix)}


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_packed_heads_half_width_keeps_leading_rows_of_each_head(name: str) -> None:
    """Entry (o, i) of the paper's matrix is 10 o + i, entry o of its bias is o."""
    matrix = [[10.0 * o + i for i in range(8)] for o in range(8)]
    bias = torch.arange(8.0).view(2, 4).T.unsqueeze(1)
    part = narrow_attention(8, {f"{name}.weight": into_heads(matrix), f"{name}.bias": bias})
    kept = part[f"{name}.weight"].permute(2, 0, 1).flatten(0, 1)
    assert kept.tolist() == [[0, 1, 2, 3], [10, 11, 12, 13], [40, 41, 42, 43], [50, 51, 52, 53]]
    assert part[f"{name}.bias"].permute(2, 0, 1).flatten().tolist() == [0, 1, 4, 5]


def test_packed_heads_output_projection_keeps_same_columns() -> None:
    matrix = [[10.0 * o + i for i in range(8)] for o in range(8)]
    part = narrow_attention(8, {"out.weight": out_of_heads(matrix), "out.bias": torch.arange(8.0)})
    kept = part["out.weight"].permute(0, 2, 1).flatten(1)
    assert kept.tolist() == [[0, 1, 4, 5], [10, 11, 14, 15], [20, 21, 24, 25], [30, 31, 34, 35]]
    assert part["out.bias"].tolist() == [0, 1, 2, 3]


def test_packed_heads_narrow_model_uses_all_heads() -> None:
    """Four numbers a token, two heads of two; half is two numbers and two heads of one. 99 is what must not be kept.

    Tokens (1, 0) and (0, 1). The first head looks at both alike and hears 2 and 4: 3. The second, at the first token,
    has likenesses 0 and ln 3, so shares 1/4 and 3/4 of 0 and 8: 6; at the second token it looks at both alike: 4.
    The first output is first head + 10 x second, the other half less the first head.
    """
    left = [99.0] * 4
    weights = {
        "query.weight": into_heads([[0.0, 0.0, 99, 99], left, [math.log(3), 0.0, 99, 99], left]),
        "key.weight": into_heads([[5.0, 7.0, 99, 99], left, [0.0, 1.0, 99, 99], left]),
        "value.weight": into_heads([[2.0, 4.0, 99, 99], left, [0.0, 8.0, 99, 99], left]),
        "out.weight": out_of_heads([[1.0, 99, 10.0, 99], [-1.0, 99, 0.0, 99], left, left]),
        "out.bias": torch.tensor([0.0, 0.5, 99.0, 99.0]),
    }
    attention = language_net(4, 0.5).module().get_submodule("layers.0.attention").eval()
    attention.load_state_dict(narrow_attention(4, weights))
    with torch.no_grad():
        output = attention(torch.eye(2).unsqueeze(0))[0]
    assert output.tolist() == [pytest.approx([63.0, -2.5], abs=1e-4), pytest.approx([43.0, -2.5], abs=1e-4)]


WORDS, HELD = 6, ((0, 1, 2), (1, 2), (2, 3), (0, 3))  # the tokens of each device; none has 4 or 5, and 6 is the mask


def round_on_text(
    world: Callable[..., Any], meddling: Callable[..., Any], method: HeteroFL
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Reply], list[set[int]]]:
    """Weights before and after one round of devices of two widths, their uploads, and the tokens each has seen."""
    sim = world(
        "transformer",
        widths=(1.0, 0.5),
        sizes=(6, 5, 6, 7),
        labels=HELD,
        classes=WORDS,
        preparation=Preparation(mask_chance=0.4, mask_token=WORDS),
        embedding=8,
        depth=None,  # all layers in both
    )
    before = method.start(sim.fleet, 0)["weights"]
    engine = meddling(sim.engine(method), lambda replies: replies)
    after = sim.play(method, engine, rounds=1)["weights"]
    words = [set(sim.dataset.train.x[torch.as_tensor(rows)].flatten().tolist()) for rows in sim.partition.train]
    assert len(engine.delivered) == len(HELD)
    return dict(before), dict(after), engine.delivered, words


def mean_over_holders(old: Tensor, at: tuple[int, ...], sent: list[tuple[Tensor, set[int]]], is_word: bool) -> float:
    """One weight: the mean over devices whose slice has it and, for a token's row, that have seen the token."""
    values = [
        float(one[at])
        for one, words in sent
        if all(index < size for index, size in zip(at, one.shape, strict=True)) and (not is_word or at[0] in words)
    ]
    return (
        float(torch.tensor(sum(values) / len(values), dtype=torch.float64).to(old.dtype)) if values else float(old[at])
    )


def test_heterofl_embedding_rows_are_averaged_over_devices_with_token(
    world: Callable[..., Any], meddling: Callable[..., Any]
) -> None:
    before, after, replies, words = round_on_text(world, meddling, HeteroFL())
    assert words == [set(held) for held in HELD] and len({reply.device.tier for reply in replies}) == 2
    of_words = {name for name in before if name == "entry.tokens.weight" or ".classifier." in name}
    assert len(of_words) == 5  # the embedding, and weight and bias of the exit and of the decoder
    for name, old in before.items():
        sent = [
            (reply.upload["weights"][name], words[int(reply.device.name)])
            for reply in replies
            if name in reply.upload["weights"]
        ]
        for index in np.ndindex(*old.shape):
            assert float(after[name][index]) == mean_over_holders(old, index, sent, name in of_words), name


def test_heterofl_rows_of_mask_and_absent_tokens_are_unchanged(
    world: Callable[..., Any], meddling: Callable[..., Any], bits_equal: Callable[..., bool]
) -> None:
    before, after, replies, _ = round_on_text(world, meddling, HeteroFL())
    name = "entry.tokens.weight"
    for reply in replies:
        given, sent = reply.device.footprint.read(before)[name], reply.upload["weights"][name]
        decay = float(sent[4, 0] / given[4, 0])  # weight decay is all that changes a token the device never reads
        assert decay < 1 and torch.allclose(sent[5], decay * given[5], atol=1e-7)
        assert not torch.allclose(sent[WORDS], decay * given[WORDS], atol=1e-4)  # the mask's row was trained
    assert before[name].shape[0] == WORDS + 1
    assert bits_equal(after[name][4:], before[name][4:])
    changed = after[name][:4] != before[name][:4]
    assert bool(changed[:3].all() and changed[3, :4].all())
    assert bits_equal(after[name][3, 4:], before[name][3, 4:])  # only narrow devices have token 3
    for head in ("exit", "decoder"):
        for key in (f"{head}.classifier.weight", f"{head}.classifier.bias"):
            assert bits_equal(after[key][4:], before[key][4:])
    bias_name = "decoder.classifier.bias"  # the exit is not trained
    assert bool((after[bias_name][:4] != before[bias_name][:4]).all())


def test_heterofl_without_only_seen_rows_averages_mask_row(
    world: Callable[..., Any], meddling: Callable[..., Any]
) -> None:
    before, after, _, _ = round_on_text(world, meddling, HeteroFL(only_seen_rows=False))
    assert bool((after["entry.tokens.weight"][4:] != before["entry.tokens.weight"][4:]).all())


class Lookup(nn.Embedding):
    """Every token has two logits of its own."""

    foldable = False


def lookup(*, tokens: int) -> nn.Module:
    return Lookup(tokens, 2)


def logits_with_loss(mean: float) -> list[float]:
    """Logits of two tokens that give this loss."""
    return [0.0, math.log(math.exp(mean) - 1)]


@pytest.mark.parametrize("held_by", ["server", "devices"])
def test_perplexity_of_two_batches_matches_hand_value(held_by: str) -> None:
    """Mean losses 1 and 2: (e + e²) / 2 = 5.053669, and e^1.5 = 4.481689. The last row, of losses 2.5, is hidden."""
    weights = {"weight": torch.tensor([logits_with_loss(0.5), logits_with_loss(1.5), logits_with_loss(2.5)])}
    x = torch.tensor([[0, 0], [1, 1], [1, 1], [2, 2]])
    tests = Examples(x, torch.zeros_like(x))
    fleet = Fleet(make_nested_tiers([("a", build_model("lookup", lookup, {}, (2,), 2, 3))]), (1.0,), 2, seed=0)
    own = (np.arange(4), np.array([0, 1]))
    evaluator = Evaluator(
        Dataset("two batches", tests, tests, 2, Preparation(mask_token=2), 3),
        local_tests=[torch.from_numpy(rows) for rows in own],
        seen_labels=torch.ones(2, 2, dtype=torch.bool),
        statistics=BatchNormStatistics(),
        batch_size=2,
    )
    engine = InProcess(
        build_client_data(evaluator.dataset, Partition(own, own), fleet),
        ClientStateStore(lambda _: {}),
        Schedule(),
        Sgd(),
        Constant(),
        seed=0,
    )
    carried = DeviceModel(lambda client, inbox: (client.model, inbox["weights"]), lambda device: {"weights": weights})
    candidate = tier_slices(weights) if held_by == "server" else carried
    rows = evaluator.rows(
        {"one": candidate}, fleet, lambda task, boxes: engine.ask(Request(task, boxes, 1)), 1, per_device=True
    )
    found = {(row.test, row.device, row.metric): row.value for row in rows}
    for device in ("",) if held_by == "server" else ("", "0", "1"):
        assert round(found["global", device, "perplexity"], 6) == 5.053669
        assert round(found["global", device, "perplexity_of_mean"], 6) == 4.481689
        assert found["global", device, "perplexity_hidden"] == pytest.approx(math.exp(2.5), rel=1e-6)
        assert found["global", device, "accuracy"] == 25.0  # only a loss of 0.5 is below that of guessing
        assert found["global", device, "accuracy_hidden"] == 0.0
    if held_by == "devices":
        assert round(found["local", "0", "perplexity"], 6) == 5.053669
        assert found["local", "1", "perplexity"] == pytest.approx(math.e, rel=1e-6)
        assert ("local", "1", "perplexity_hidden") not in found  # it has no masked tokens
        assert found["local", "", "perplexity"] == pytest.approx((4 * math.e + 2 * math.exp(2)) / 6, rel=1e-6)
        assert found["local", "", "perplexity_of_mean"] == pytest.approx(math.exp(8 / 6), rel=1e-6)
