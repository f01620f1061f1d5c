"""Which test examples a run's models get right in the end.

Arms of a comparison are tested on the same examples, and a hard example is hard for all of them. Compared example by
example, a difference is known better than from two accuracies alone.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .folder import read_manifest

CORRECT_FILE = "correct.json"

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class CorrectExamples:
    """Which examples of the global test set the models of a run get right.

    Parameters
    ----------
    round : after which they were evaluated.
    data : the fingerprint of the data set: runs with the same one have the same examples.
    by_model : a flag for each example, by the names of candidate and tier.
    """

    round: int
    data: str
    by_model: Mapping[tuple[str, str], Flags]


def describe_correct(number: int, correct: Mapping[tuple[str, str], Tensor]) -> dict[str, Any]:
    """As JSON, eight examples to a byte.

    Parameters
    ----------
    number : the round after which the models were evaluated.
    correct : a flag for each example, by the names of candidate and tier.
    """
    models = [
        {
            "candidate": candidate,
            "tier": tier,
            "examples": len(flags),
            "correct": np.packbits(flags.numpy()).tobytes().hex(),
        }
        for (candidate, tier), flags in correct.items()
    ]
    return {"round": number, "models": models}


def read_correct(folder: Path) -> CorrectExamples | None:
    """What a run has recorded; None if it has not, as before its last round, or for tasks without class labels.

    Parameters
    ----------
    folder : the run's.
    """
    path = folder / CORRECT_FILE
    if not path.is_file():
        return None
    known = json.loads(path.read_text(encoding="utf-8"))
    by_model = {(one["candidate"], one["tier"]): _unpack(one["correct"], one["examples"]) for one in known["models"]}
    return CorrectExamples(known["round"], str(read_manifest(folder).get("data", "")), by_model)


def _unpack(packed: str, examples: int) -> Flags:
    return np.unpackbits(np.frombuffer(bytes.fromhex(packed), np.uint8), count=examples).astype(np.bool_)
