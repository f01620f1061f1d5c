"""Which axes stack several things: known, recognized, traced and declared."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.models import LayoutError, Model, build_model, concatenated, gates, heads, packed
from fedloom.models.axes import Layout
from tests.models import stacked_nets as nets


def layouts(build: Callable[..., nn.Module], shape: tuple[int, ...] = nets.SHAPE, **settings: Any) -> dict[str, Layout]:
    """By weight and axis, without those of channels on a third axis."""
    model = build_model(build.__name__, build, settings, shape, nets.CLASSES)
    both = {**model.shapes().layouts, **model.statistics().layouts}
    return {
        f"{name}:{axis}": one for name, axes in both.items() for axis, one in axes.items() if len(one[0]) + len(one) > 2
    }


def test_layouts_lstm_rows_are_gates() -> None:
    four = ((4, 8),)
    assert layouts(nets.lstm, hidden=8) == {
        f"layer.{name}_l0:0": four for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    }


def test_layouts_bidirectional_gru_inputs_of_later_layers_are_both_directions() -> None:
    found = layouts(nets.gru, hidden=4, both=True, layers=2)
    assert found["layer.weight_ih_l1_reverse:0"] == ((3, 4),)
    assert found["layer.weight_ih_l1_reverse:1"] == found["classifier.weight:1"] == ((4,), (4,))
    assert "layer.weight_ih_l0:1" not in found and "layer.weight_hh_l1:1" not in found


def test_layouts_lstm_projection_has_its_own_size() -> None:
    found = layouts(nets.lstm, hidden=6, both=True, layers=2, projection=2)
    assert found["layer.weight_ih_l1:1"] == found["classifier.weight:1"] == ((2,), (2,))
    assert found["layer.weight_hh_l0:0"] == ((4, 6),) and "layer.weight_hr_l0:0" not in found


def test_layouts_plain_rnn_and_cells() -> None:
    assert layouts(nets.rnn, hidden=8) == {}
    assert layouts(nets.cells, hidden=6)["cell.weight_hh:0"] == ((4, 6),)


def test_layouts_multihead_attention_packs_heads() -> None:
    found = layouts(nets.vit, size=8, heads=2)
    assert found == {
        "encoder.layers.0.self_attn.in_proj_weight:0": ((3, 2, 4),),
        "encoder.layers.0.self_attn.in_proj_bias:0": ((3, 2, 4),),
        "encoder.layers.0.self_attn.out_proj.weight:1": ((2, 4),),
    }


def test_layouts_multihead_attention_separate_projections() -> None:
    found, grid = layouts(nets.cross_attention, size=8), ((2, 4),)
    names = ("q_proj_weight:0", "k_proj_weight:0", "v_proj_weight:0", "bias_k:2", "bias_v:2", "out_proj.weight:1")
    assert found == {"attention.in_proj_bias:0": ((3, 2, 4),), **{f"attention.{name}": grid for name in names}}


def test_layouts_attention_with_usual_names_is_recognized() -> None:
    found = layouts(nets.attention_net, kind="named", size=8, heads=2)
    rows = {f"attention.{name}_proj.{key}:0": ((2, 4),) for name in "qkv" for key in ("weight", "bias")}
    assert found == {**rows, "attention.out_proj.weight:1": ((2, 4),)}


def test_layouts_attention_with_other_names_is_not_recognized() -> None:
    assert layouts(nets.attention_net, kind="own") == {}


class Grouped(nn.Module):
    """Fewer heads of keys and values than of queries, and a packed variant as timm has it."""

    def __init__(self, packs: bool) -> None:
        super().__init__()
        self.num_heads = 4
        if packs:
            self.qkv, self.proj = nn.Linear(8, 24), nn.Sequential(nn.Linear(8, 3), nn.Dropout(0.0))
        else:
            self.to_q, self.to_k, self.to_v = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 6)
            self.to_out = nn.Sequential(nn.Linear(12, 3), nn.Dropout(0.0))


def grouped(packs: bool) -> nn.Module:
    return Grouped(packs)


def test_layouts_grouped_queries_have_fewer_heads_of_keys() -> None:
    found = layouts(grouped, packs=False)
    assert found["to_q.weight:0"] == ((4, 2),) and found["to_k.bias:0"] == ((2, 2),)
    assert found["to_v.weight:0"] == ((2, 3),) and found["to_out.0.weight:1"] == ((4, 3),)


def test_layouts_packed_attention_with_usual_names_is_recognized() -> None:
    found = layouts(grouped, packs=True)
    assert found == {"qkv.weight:0": ((3, 4, 2),), "qkv.bias:0": ((3, 4, 2),), "proj.0.weight:1": ((4, 2),)}


def test_layouts_dense_net_inputs_are_concatenated() -> None:
    found = layouts(nets.dense_net, nets.IMAGE, stem=6, growth=4, layers=2)
    assert found["layers.1.2.weight:1"] == ((6,), (4,))
    for key in ("weight", "bias", "running_mean", "running_var"):
        assert found[f"norm.{key}:0"] == ((6,), (4,), (4,))
    assert found["classifier.weight:1"] == ((6, 4), (4, 4), (4, 4))
    assert "layers.0.2.weight:1" not in found


class Joined(nn.Module):
    """`how` two maps come together before a layer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.left, self.right = how, nn.Conv2d(1, 4, 1), nn.Conv2d(1, 2, 1)
        self.six, self.each = nn.Conv2d(1, 6, 1), nn.Conv2d(6, 6, 3, groups=6, padding=1)
        self.last, self.spare = nn.Linear(6, nets.CLASSES), nn.Conv2d(6, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.left(x), self.right(x)], 1)
        match self.how:
            case "added":
                both = both + self.six(x)
            case "gated":
                both = both * both.mean((2, 3), keepdim=True).sigmoid()
            case "depthwise":
                both = F.max_pool2d(self.each(both), 2)
            case "twice":
                both = self.spare(both) + self.spare(self.six(x))
            case "transposed":
                return self.last(both.flatten(2).transpose(1, 2)).mean(1)  # type: ignore[no-any-return]
        return self.last(both.mean((-2, -1)))  # type: ignore[no-any-return]


def joined(how: str) -> nn.Module:
    return Joined(how)


@pytest.mark.parametrize("how", ["plain", "gated", "depthwise", "transposed"])
def test_layouts_trace_follows_concatenated_channels(how: str) -> None:
    found = layouts(joined, nets.IMAGE, how=how)
    assert found["last.weight:1"] == ((4,), (2,))
    assert ("each.weight:0" in found) == (how == "depthwise")


@pytest.mark.parametrize("how", ["added", "twice"])
def test_layouts_trace_of_mixed_channels_finds_nothing(how: str) -> None:
    assert layouts(joined, nets.IMAGE, how=how) == {}


def test_layouts_module_that_cannot_run_is_not_traced() -> None:
    assert layouts(grouped, packs=True)  # it has no forward


class Declared(nn.Module):
    def __init__(self, axes: Any) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.qkv, self.body.gates = nn.Linear(4, 12), nn.Parameter(torch.zeros(8, 2))
        self.body.stacked_axes = axes


DECLARATIONS: dict[str, Any] = {
    "right": {"qkv.weight": {0: packed(3, heads(2)), 1: concatenated(3, 1)}, "gates": {0: gates(4)}},
    "unknown": {"kqv.weight": {0: packed(3)}},
    "axis": {"gates": {2: heads(2)}},
    "length": {"qkv.bias": {0: heads(5)}},
}


def declared(case: str) -> nn.Module:
    return Declared(DECLARATIONS[case])


def test_layouts_declaration_is_relative_to_its_module() -> None:
    assert layouts(declared, case="right") == {
        "body.qkv.weight:0": ((3, 2, 2),),
        "body.qkv.weight:1": ((3,), (1,)),
        "body.gates:0": ((4, 2),),
    }


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("unknown", r"stacked_axes of body \(Module\) names kqv.weight, which is no weight of it; it has: gates, qkv"),
        ("axis", r"stacked_axes of body \(Module\) names axis 2 of gates, whose shape is \(8, 2\)"),
        (
            "length",
            r"does not fit axis 0 of qkv.bias, whose shape is \(12,\): an axis of length 12 cannot be divided by 5",
        ),
    ],
)
def test_layouts_wrong_declaration_is_refused_by_name(case: str, message: str) -> None:
    model: Model = build_model("declared", declared, {"case": case}, nets.SHAPE, nets.CLASSES)
    with pytest.raises(LayoutError, match=message):
        model.shapes()


def test_layouts_declaration_takes_precedence_over_recognition() -> None:
    assert layouts(overruled)["attention.q_proj.weight:0"] == ((1, 8),)


def overruled() -> nn.Module:
    net = nets.attention_net("named")
    net.stacked_axes = {"attention.q_proj.weight": {0: heads(1)}}
    return net


class OwnLinear(nn.Linear):
    """A layer that might do anything."""


@pytest.mark.parametrize(
    ("layer", "home", "enough"),
    [(nn.Linear, "fedloom.models.sampled", 2), (OwnLinear, "fedloom.models.sampled", 16), (nn.Linear, "sampled", 16)],
)
def test_layouts_sampled_sizes_are_not_traced_forever(
    layer: type[nn.Linear], home: str, enough: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After so many sizes of a kind without concatenation; fewer if the family is ours and all layers are known."""
    traced: list[nn.Module] = []

    def trace(module: nn.Module, inputs: Any) -> dict[str, dict[int, Layout]]:
        traced.append(module)
        return {}

    def sampled(size: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), layer(nets.FEATURES * nets.LENGTH, size), nn.Linear(size, nets.CLASSES))

    monkeypatch.setattr("fedloom.models.model.find_concatenated_inputs", trace)
    monkeypatch.setattr(sampled, "__module__", home)
    for size in range(2, 42):
        build_model("sampled", sampled, {"size": size}, nets.SHAPE, nets.CLASSES).shapes()
    assert len(traced) == enough
