"""What a module's forward may return."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedloom.models import Outputs
from fedloom.models.structure import as_outputs

LOGITS = torch.arange(6.0).view(2, 3)


def test_as_outputs_of_tensor_outputs_or_object_with_logits_has_the_logits() -> None:
    outputs = Outputs({"early": LOGITS + 1, "late": LOGITS}, {})
    assert as_outputs(outputs) is outputs
    for result in (LOGITS, SimpleNamespace(logits=LOGITS, loss=None)):
        assert as_outputs(result).logits is LOGITS
        assert list(as_outputs(result).exits) == ["logits"]


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        ((LOGITS, LOGITS), "tuple"),
        ([LOGITS], "list"),
        ({"logits": LOGITS}, "dict"),
        (None, "NoneType"),
        (SimpleNamespace(logits=None), "SimpleNamespace"),
        (SimpleNamespace(last_hidden_state=LOGITS), "SimpleNamespace"),
    ],
)
def test_as_outputs_of_anything_else_names_what_forward_must_return(result: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"^its forward returned a {kind}.*; it must return the logits as one tensor"):
        as_outputs(result)
