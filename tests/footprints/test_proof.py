"""A footprint is accepted if the part of the large model computes what the small one does, else refused by name."""

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.fleet import Fleet, find_nesting_problem, make_tiers
from fedloom.footprints import find_footprint, find_slicing_problem, is_submodel
from fedloom.models import MODELS, Model, Outputs, build_model
from tests.models import stacked_nets as nets

Settings = dict[str, Any]


def models(
    build: Callable[..., nn.Module], large: Settings, small: Settings, shape: tuple[int, ...] = nets.SHAPE
) -> tuple[Model, Model]:
    wide, narrow = (build_model(build.__name__, build, one, shape, nets.CLASSES) for one in (large, small))
    return narrow, wide


def problem(
    build: Callable[..., nn.Module], large: Settings, small: Settings, shape: tuple[int, ...] = nets.SHAPE
) -> str | None:
    narrow, wide = models(build, large, small, shape)
    return find_nesting_problem(Fleet(make_tiers([("large", wide), ("small", narrow)]), (0.5, 0.5), 2, seed=0))


@pytest.mark.parametrize(
    ("build", "large", "small"),
    [
        (nets.lstm, {"hidden": 8}, {"hidden": 3}),
        (nets.lstm, {"hidden": 8, "both": True, "layers": 2}, {"hidden": 4, "both": True, "layers": 2}),
        (nets.lstm, {"hidden": 8, "projection": 4, "both": True}, {"hidden": 5, "projection": 2, "both": True}),
        (nets.gru, {"hidden": 8, "both": True, "layers": 2}, {"hidden": 4, "both": True, "layers": 2}),
        (nets.rnn, {"hidden": 8, "both": True}, {"hidden": 4, "both": True}),
        (nets.last_states, {"hidden": 8}, {"hidden": 4}),
        (nets.cells, {"hidden": 8}, {"hidden": 4}),
        (nets.vit, {"size": 16}, {"size": 8}),
        (nets.vit, {"size": 16, "heads": 4}, {"size": 8, "heads": 2}),
        (nets.vit, {"size": 16, "norm_first": False, "layers": 2}, {"size": 8, "norm_first": False}),
        (nets.cross_attention, {"size": 16}, {"size": 8}),
        (nets.attention_net, {"kind": "named", "size": 16}, {"kind": "named", "size": 8}),
        (nets.attention_net, {"kind": "declared", "size": 16}, {"kind": "declared", "size": 8}),
    ],
)
def test_find_nesting_problem_stacked_net_is_accepted(
    build: Callable[..., nn.Module], large: Settings, small: Settings
) -> None:
    assert problem(build, large, small) is None


@pytest.mark.parametrize("layers", [2, 1])
def test_find_nesting_problem_dense_net_is_accepted(layers: int) -> None:
    small = {"stem": 4, "growth": 2, "layers": layers}
    assert problem(nets.dense_net, {"stem": 6, "growth": 4}, small, nets.IMAGE) is None


@pytest.mark.parametrize(
    ("kind", "module", "before"),
    [("own", "attention.four", "attention.three"), ("packed", "attention.outer", "norm")],
)
def test_find_nesting_problem_undeclared_attention_is_refused_by_name(kind: str, module: str, before: str) -> None:
    """Sliced across heads unnoticed, it would train nonsense."""
    found = problem(nets.attention_net, {"kind": kind, "size": 16}, {"kind": kind, "size": 8})
    assert found is not None and found.startswith("tier 'small': ")
    assert f"{module} (Linear) receives something else: what is computed after {before} stacks" in found
    assert "declare what the axes stack in the module's `stacked_axes`" in found


def test_find_nesting_problem_concatenation_that_cannot_be_traced_is_refused_by_name() -> None:
    large, small = {"stem": 6, "growth": 4, "mirrored": True}, {"stem": 4, "growth": 2, "mirrored": True}
    found = problem(nets.dense_net, large, small, nets.IMAGE)
    assert found is not None and "layers.1.0 (BatchNorm2d) computes something else from the same numbers" in found


def test_find_nesting_problem_separate_projections_are_sliced_in_every_head() -> None:
    narrow, wide = models(nets.attention_net, {"kind": "named", "size": 16}, {"kind": "named", "size": 8})
    rows, _ = find_footprint(narrow.shapes(), wide.shapes()).blocks["attention.q_proj.weight"]
    assert isinstance(rows, Tensor) and rows.tolist() == [0, 1, 2, 3, 8, 9, 10, 11]


class Centered(nn.Module):
    """Norms, means and positions by hand."""

    def __init__(self, size: int, way: str):
        super().__init__()
        self.way, self.size = way, size
        self.stem, self.gain, self.last = (
            nn.Linear(nets.FEATURES, size),
            nn.Parameter(torch.ones(size)),
            nn.Linear(size, 3),
        )
        places = torch.arange(nets.LENGTH).unsqueeze(1) / 10 ** (torch.arange(size) / size)
        self.register_buffer("places", places.sin() if way == "positions" else torch.zeros(nets.LENGTH, size))
        self.glu = nn.Linear(size, 2 * size)
        self.groups = nn.GroupNorm(2, size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) + self.places
        match self.way:
            case "rms":
                x = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
            case "std":
                x = x / (x.std(-1, keepdim=True) + 1e-6)
            case "scaled":
                x = x * self.size**-0.5 / torch.full((), self.size) + x.sum(-1, keepdim=True) / self.size
            case "glu":
                x = F.glu(self.glu(x))
            case "groups":
                x = self.groups(x.mT).mT
            case "gated":
                x = x * x.softmax(-1)
            case "noisy":
                x = x + torch.randn_like(x)
            case "sorted":
                x = x.sort(-1).values
        return self.last((x * self.gain).mean(1))  # type: ignore[no-any-return]


def by_hand(way: str, size: int = 8) -> nn.Module:
    return Centered(size, way)


@pytest.mark.parametrize("way", ["rms", "std", "scaled", "groups", "gated", "noisy"])
def test_find_nesting_problem_arithmetic_of_width_is_accepted(way: str) -> None:
    assert problem(by_hand, {"way": way, "size": 8}, {"way": way, "size": 4}) is None


def test_find_nesting_problem_other_constant_is_named() -> None:
    found = problem(by_hand, {"way": "positions", "size": 8}, {"way": "positions", "size": 4})
    assert found is not None and "its constant places has other values than in the global model" in found


@pytest.mark.parametrize("way", ["glu", "sorted"])
def test_find_nesting_problem_operation_across_channels_is_refused(way: str) -> None:
    found = problem(by_hand, {"way": way, "size": 8}, {"way": way, "size": 4})
    assert found is not None and "last (Linear) receives something else" in found


class Deep(nn.Module):
    """Layers with or without a residual sum, an exit after the first, and a net that trusts itself."""

    def __init__(self, size: int, depth: int, residual: bool, exits: bool, shrinks: bool, trusted: bool):
        super().__init__()
        self.residual, self.exits, self.sliceable = residual, exits, trusted
        self.stem, self.exit, self.last = nn.Conv2d(1, size, 3), nn.Linear(size, 3), nn.Linear(size, 3)
        self.layers = nn.ModuleList(nn.Conv2d(size, size, 1, 2 if shrinks else 1) for _ in range(depth))

    def forward(self, x: Tensor) -> Outputs:
        x = F.relu(self.stem(x))
        exits = {"early": self.exit(x.mean((-2, -1)))} if self.exits else {}
        for layer in self.layers:
            x = x + layer(x) if self.residual else F.relu(layer(x))
        return Outputs({**exits, "full": self.last(x.mean((-2, -1)))}, {})


def deep(
    size: int = 8,
    depth: int = 1,
    residual: bool = False,
    exits: bool = False,
    shrinks: bool = False,
    trusted: bool = False,
) -> nn.Module:
    return Deep(size, depth, residual, exits, shrinks, trusted)


@pytest.mark.parametrize(
    "common", [{"residual": True}, {"residual": True, "exits": True}, {}, {"shrinks": True, "trusted": True}]
)
def test_find_nesting_problem_narrower_and_shallower_is_accepted(common: Settings) -> None:
    large = {"depth": 3, **common}
    assert problem(deep, large, {"size": 4, **common}, nets.IMAGE) is None


def test_find_nesting_problem_narrower_before_layers_of_the_global_model_is_refused() -> None:
    """The classifier of the large net receives a smaller map."""
    found = problem(deep, {"depth": 2, "shrinks": True}, {"size": 4, "shrinks": True}, nets.IMAGE)
    assert found is not None and "last (Linear) receives something else" in found
    assert "depends on layers that only the global model has, such as that of layers.1.bias" in found


def test_find_nesting_problem_pure_depth_has_nothing_to_prove() -> None:
    assert problem(deep, {"depth": 2, "shrinks": True}, {"shrinks": True}, nets.IMAGE) is None


class Trusting(nn.Module):
    sliceable = True

    def forward(self, x: Tensor) -> Tensor:
        return x.sort(1).values


class PartlyTrusting(nn.Module):
    def __init__(self, size: int, wrong: bool):
        super().__init__()
        self.stem, self.middle, self.last = nn.Linear(nets.FEATURES, size), Trusting(), nn.Linear(size, 3)
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.stem(x.mean(1)))
        return self.last(x.flip(1) if self.wrong else x)  # type: ignore[no-any-return]


def partly_trusting(size: int, wrong: bool = False) -> nn.Module:
    return PartlyTrusting(size, wrong)


def test_find_nesting_problem_submodule_declared_sliceable_is_left_out() -> None:
    assert problem(partly_trusting, {"size": 8}, {"size": 4}) is None
    found = problem(partly_trusting, {"size": 8, "wrong": True}, {"size": 4, "wrong": True})
    assert found is not None and "last (Linear) computes something else from the same numbers" in found


class Failing(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.only = nn.Linear(nets.FEATURES, size)

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("not today")


def failing(size: int) -> nn.Module:
    return Failing(size)


def test_find_slicing_problem_module_that_fails_is_not_accepted() -> None:
    narrow, wide = models(failing, {"size": 8}, {"size": 4})
    assert find_slicing_problem(narrow, wide) == (
        "that it is a smaller net cannot be tried, because it does not run: not today"
    )


def test_find_slicing_problem_leaves_no_trace() -> None:
    """Neither in torch's settings nor in its random numbers."""
    narrow, wide = models(nets.attention_net, {"kind": "own", "size": 16}, {"kind": "own", "size": 8})
    before = torch.get_rng_state()
    find_slicing_problem.cache_clear()
    assert find_slicing_problem(narrow, wide) is not None
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_default_dtype() is torch.float32 and torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("width", [0.5, 0.3])
def test_find_slicing_problem_every_family_is_accepted(
    family: str, width: float, tiny_model: Callable[..., Model]
) -> None:
    assert find_slicing_problem(tiny_model(family, width=width), tiny_model(family)) is None


def test_find_slicing_problem_transformer_heads_are_those_of_torch() -> None:
    """The built-in transformer has an axis for the heads: its slices are those of heads that are stacked."""
    sizes = {"embedding": 8, "heads": 2, "hidden": 6, "layers": 1}
    wide = build_model("transformer", MODELS["transformer"], sizes, (5,), 4, 5)
    narrow = wide.with_settings(width=0.5)
    assert find_slicing_problem(narrow, wide) is None
    own, torchs = (
        find_footprint(small.shapes(), large.shapes()).read(weights)
        for small, large, weights in (
            (narrow, wide, {name: _numbered(shape) for name, shape in wide.shapes().items()}),
            (*models(nets.vit, {"size": 8}, {"size": 4}), _packed_like(wide)),
        )
    )
    rows = own["layers.0.attention.query.weight"].permute(2, 0, 1).flatten(0, 1)
    assert torch.equal(torchs["encoder.layers.0.self_attn.in_proj_weight"][: len(rows)], rows)


def _numbered(shape: torch.Size) -> Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


def _packed_like(transformer: Model) -> dict[str, Tensor]:
    """Torch's attention with the numbered queries of the built-in one, whose heads are on the last axis."""
    _, wide = models(nets.vit, {"size": 8}, {"size": 4})
    weights = {name: _numbered(shape) for name, shape in wide.shapes().items()}
    query = _numbered(transformer.shapes()["layers.0.attention.query.weight"]).permute(2, 0, 1).flatten(0, 1)
    weights["encoder.layers.0.self_attn.in_proj_weight"] = torch.cat([query] * 3)
    return weights


@pytest.mark.slow
def test_find_slicing_problem_full_size_residual_net_takes_a_second() -> None:
    wide = build_model("preresnet", MODELS["preresnet"], {}, (3, 32, 32), 10)
    narrow = wide.with_settings(width=0.5)
    assert is_submodel(narrow.shapes(), wide.shapes())
    start = time.process_time()
    assert find_slicing_problem(narrow, wide) is None
    assert time.process_time() - start < 2
