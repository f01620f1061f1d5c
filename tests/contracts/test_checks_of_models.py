"""`check_model` works: every built-in family passes, and each mistake is found by the check for it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom.models import MODELS, Outputs, build_model, packed
from fedloom.testing import MODEL_CHECKS, CheckFailed, check_model
from fedloom.testing.world import SMALLER_SETTINGS, TINY_SETTINGS
from tests.conftest import TOKENS, smaller_size

QUICK = ("convnet", "lstm", "mlp", "preactresnet")  # the others are tested in tests/models too


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in sorted(MODELS)]
)
def test_check_model_of_built_in_family_passes(name: str) -> None:
    tiny, tokens = TINY_SETTINGS[name], 5 if name in TOKENS else None
    tiers = (tiny, {**tiny, **smaller_size(name), **SMALLER_SETTINGS.get(name, {})})
    report = check_model(name, tiers=tiers, tokens=tokens)
    assert report.passed == tuple(MODEL_CHECKS)
    assert report.notes == {}


class Net(nn.Module):
    """A network in pieces that the broken ones below replace."""

    def __init__(self, classes: int = 4, width: float = 1.0):
        super().__init__()
        self.first = nn.Linear(36, int(6 * width))
        self.last = nn.Linear(int(6 * width), classes)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x.flatten(1)).relu())


def net(*, classes: int, width: float = 1.0) -> nn.Module:
    return Net(classes, width)


def test_check_model_of_own_function_passes() -> None:
    report = check_model(net)
    assert report.passed == tuple(MODEL_CHECKS)
    assert report.notes == {}
    assert repr(report).startswith(f"net: {len(MODEL_CHECKS)} checks passed\n  module, output_size, ")


class InPlace(Net):
    def forward(self, x: Tensor) -> Any:
        x *= 0.5
        return super().forward(x)


class Remembers(Net):
    last_mean: Any = 0.0

    def forward(self, x: Tensor) -> Any:
        made = super().forward(x) + self.last_mean
        self.last_mean = x.mean().detach()
        return made


class MixesDevices(Net):
    """The trial has two examples per device, so it cannot see what happens with more."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x - x.mean() if len(x) > 2 else x)


class Detached(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).detach()


class Infinite(Net):
    def forward(self, x: Tensor) -> Any:
        return (super().forward(x) * 0).sqrt()


class ExitOnlyInTraining(Net):
    def forward(self, x: Tensor) -> Any:
        made = super().forward(x)
        return Outputs({"early": made, "late": made} if self.training else {"late": made}, {})


class NeedsTwo(Net):
    def forward(self, x: Tensor) -> Any:
        if len(x) < 2:
            raise ValueError("a batch of one")
        return super().forward(x)


def numpy_weights(*, classes: int) -> nn.Module:
    made = Net(classes)
    made.first.weight.data = torch.from_numpy(np.random.normal(size=(6, 36))).float()
    return made


BROKEN: list[tuple[str, str, Callable[..., Any]]] = [
    ("check_module", "an nn.Module", lambda: {"weights": 1}),
    ("check_module", "no parameter", lambda: nn.Flatten()),
    ("check_output_size", "(3, 3)", lambda: Net(3)),
    ("check_initial_weights", "'first.weight' differs", numpy_weights),
    ("check_backward", "no gradient", Detached),
    ("check_backward", "finite gradients", Infinite),
    ("check_purity", "changes it in place", InPlace),
    ("check_purity", "after another batch", Remembers),
    ("check_devices_apart", "what it gets alone", MixesDevices),
    ("check_exits", "('early', 'late')", ExitOnlyInTraining),
    ("check_model_trains", "a batch of one", NeedsTwo),
]


@pytest.mark.parametrize(("check", "message", "build"), BROKEN, ids=[f"{one[0]}-{n}" for n, one in enumerate(BROKEN)])
def test_broken_model_fails_its_check(check: str, message: str, build: Callable[..., Any]) -> None:
    with pytest.raises(CheckFailed) as failed:
        MODEL_CHECKS[check]([build_model("broken", build, {}, (1, 6, 6), 4)])
    assert failed.value.check == check
    assert message in str(failed.value)
    assert failed.value.hint


def test_every_check_is_broken_by_a_model() -> None:
    """Those that only give notes have their tests below."""
    assert {check for check, *_ in BROKEN} | {"check_nesting", "check_export"} == set(MODEL_CHECKS)


def test_check_model_names_first_failing_check() -> None:
    with pytest.raises(CheckFailed, match="check_output_size failed"):
        check_model(lambda classes, width=1.0: Net(classes + 1, width))
    with pytest.raises(CheckFailed, match="check_module failed"):
        check_model(lambda wide: Net(wide))


def test_check_model_tiers_that_do_not_nest_are_noted() -> None:
    class Renamed(Net):
        def __init__(self, width: float = 1.0):
            super().__init__()
            setattr(self, f"extra{int(10 * width)}", nn.Linear(4, int(4 * width)))

        def forward(self, x: Tensor) -> Any:
            return super().forward(x)

    notes = check_model(Renamed).notes
    assert "extra5.weight is not in the global model" in notes["check_nesting"]
    assert "no exit depends on extra10.weight" in notes["check_backward"]
    assert "does the function use its settings" in check_model(lambda width=1.0: Net()).notes["check_nesting"]


class Packed(nn.Module):
    """A gate and what it lets through, packed; `declared` or not."""

    def __init__(self, count: int | None, classes: int = 4, width: float = 1.0):
        super().__init__()
        self.joint, self.last = nn.Linear(36, 2 * int(8 * width)), nn.Linear(int(8 * width), classes)
        if count is not None:
            self.stacked_axes = {"joint.weight": {0: packed(count)}, "joint.bias": {0: packed(count)}}

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.glu(self.joint(x.flatten(1)), 1))  # type: ignore[no-any-return]


def test_check_model_slice_that_is_no_smaller_net_is_noted() -> None:
    def undeclared(classes: int, width: float = 1.0) -> nn.Module:
        return Packed(None, classes, width)

    def declared(classes: int, width: float = 1.0) -> nn.Module:
        return Packed(2, classes, width)

    assert "last (Linear) receives something else" in check_model(undeclared).notes["check_nesting"]
    assert "check_nesting" not in check_model(declared).notes


def test_check_model_declaration_that_does_not_fit_is_found() -> None:
    def wrong(classes: int, width: float = 1.0) -> nn.Module:
        return Packed(5, classes, width)

    with pytest.raises(CheckFailed, match=r"does not fit axis 0 of joint\.weight") as failed:
        check_model(wrong)
    assert failed.value.check == "check_module"


class WholeBatch(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x / (1 + x.square().sum()))


class Branches(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) if x.sum() > 0 else -super().forward(x)


def test_check_model_slow_or_untraceable_model_is_noted() -> None:
    assert "devices mix" in check_model(WholeBatch).notes["check_devices_apart"]
    assert "torch.export fails" in check_model(Branches).notes["check_export"]
