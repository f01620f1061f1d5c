"""Failed and passed checks, and comparisons of parcels that say what differs."""

import random
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from ..runs.loop import single_thread
from ..tensors import Parcel, raw_bytes

P = ParamSpec("P")


class CheckFailed(AssertionError):  # noqa: N818 - reads as the outcome that it is
    """A check that did not pass.

    Parameters
    ----------
    check
        The name of the check, a function of this module whose docstring says what it proves.
    expected
        What should have been.
    found
        What was instead.
    hint
        What usually causes it and how to repair it.
    """

    def __init__(self, check: str, expected: str, found: str, hint: str = "") -> None:
        super().__init__(check, expected, found, hint)
        self.check, self.expected, self.found, self.hint = check, expected, found, hint

    def __str__(self) -> str:
        lines = [f"{self.check} failed", f"  expected: {self.expected}", f"  found:    {self.found}"]
        return "\n".join(lines + [f"  hint:     {self.hint}"] * bool(self.hint))


@dataclass(frozen=True)
class CheckReport:
    """The checks that something passed.

    Parameters
    ----------
    subject
        What was checked.
    passed
        The names of the checks, in the order in which they ran.
    notes
        Name of a check -> a remark on something that is allowed but worth knowing.
    """

    subject: str
    passed: tuple[str, ...]
    notes: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        names = ", ".join(name.removeprefix("check_") for name in self.passed)
        lines = [f"{self.subject}: {len(self.passed)} checks passed", *textwrap.wrap(names, 96)]
        lines += [f"note, {name.removeprefix('check_')}: {note}" for name, note in self.notes.items()]
        return "\n  ".join(lines)


class Broken(Exception):  # noqa: N818 - becomes a CheckFailed with the name of the check
    def __init__(self, expected: str, found: str, hint: str = "") -> None:
        super().__init__(expected, found, hint)
        self.expected, self.found, self.hint = expected, found, hint


Check = Callable[..., str | None]
"""Raises `CheckFailed`, or returns a note for the report, or None."""

METHOD_CHECKS: dict[str, Check] = {}
"""Name -> check `(method, world)`."""

MODEL_CHECKS: dict[str, Check] = {}
"""Name -> check `(models)`, the model of every tier, the largest first."""

DATASET_CHECKS: dict[str, Check] = {}
"""Name -> check `(dataset, again)`: a data set, and the same loaded a second time."""

ENGINE_CHECKS: dict[str, Check] = {}
"""Name -> check `(make_engine)`, a function `(world, method) -> Engine`."""


def listed_in(checks: dict[str, Check]) -> Callable[[Callable[P, str | None]], Callable[P, str | None]]:
    """List a check, and let every exception in it become a `CheckFailed` that names it."""

    def decorate(function: Callable[P, str | None]) -> Callable[P, str | None]:
        name = function.__name__

        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> str | None:
            try:
                with single_thread():
                    return function(*args, **kwargs)
            except Broken as broken:
                raise CheckFailed(name, broken.expected, broken.found, broken.hint) from None
            except CheckFailed:
                raise
            except Exception as error:
                expected = (function.__doc__ or name).strip().splitlines()[0]
                raise CheckFailed(name, expected, describe_error(error), hint_of(error)) from error

        checks[name] = run
        return run

    return decorate


def describe_error(error: Exception) -> str:
    """The error, and the last line of the caller's own code that led to it."""
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(Path(frame.filename))]
    return f"{text} (at {Path(own[-1].filename).name}:{own[-1].lineno}, in {own[-1].name})" if own else text


def _is_library(file: Path) -> bool:
    return file.is_relative_to(Path(__file__).parents[1]) or "site-packages" in file.parts or file.name.startswith("<")


def hint_of(error: Exception) -> str:
    if hint := getattr(error, "hint", ""):
        return str(hint)
    if "single memory location" in str(error):
        return "a tensor of the inbox was changed in place; make a new one, such as `weight + step`"
    if "size of tensor" in str(error) or "shapes cannot be multiplied" in str(error):
        return (
            "on a device every tensor is [K, ...]; and tiers of two sizes are tried: if the method cannot train them, "
            "let check_fleet return the reason, or set info.heterogeneity"
        )
    return "the traceback above shows where it was raised"


def run_checks(subject: str, checks: Mapping[str, Check], *arguments: Any) -> CheckReport:
    found = {name: check(*arguments) for name, check in checks.items()}
    return CheckReport(subject, tuple(found), {name: note for name, note in found.items() if note})


def same_bits(left: Tensor, right: Tensor) -> bool:
    """True if two tensors are equal as stored: a zero of the other sign differs, and a NaN equals itself.

    Parameters
    ----------
    left, right
        The tensors to compare.

    Returns
    -------
    bool
        False also if shapes or dtypes differ.
    """
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return raw_bytes(left) == raw_bytes(right)


def same_parcel(left: Parcel, right: Parcel) -> bool:
    """True if two parcels have the same bundles, names and bits.

    Parameters
    ----------
    left, right
        The parcels to compare.

    Returns
    -------
    bool
    """
    return left.keys() == right.keys() and all(
        left[bundle].keys() == right[bundle].keys()
        and all(same_bits(tensor, right[bundle][name]) for name, tensor in tensors.items())
        for bundle, tensors in left.items()
    )


def largest_difference(left: Parcel, right: Parcel) -> float:
    """The largest difference between two numbers of two parcels with the same names.

    Parameters
    ----------
    left, right
        Parcels with the same bundles and tensors.

    Returns
    -------
    float
        0.0 for parcels without tensors.
    """
    assert left.keys() == right.keys()
    differences = [0.0]
    for bundle, tensors in left.items():
        assert tensors.keys() == right[bundle].keys()
        differences += [
            float((t.double() - right[bundle][name].double()).abs().max()) for name, t in tensors.items() if t.numel()
        ]
    return max(differences)


def describe_difference(left: Parcel, right: Parcel, tolerance: float | None = None) -> str | None:
    """The first tensor in which two parcels differ, in words; with a tolerance, by more than it."""
    for bundle in sorted({*left, *right}):
        if bundle not in left or bundle not in right:
            return f"only one of them has the bundle {bundle!r}"
        for name in sorted({*left[bundle], *right[bundle]}):
            where = f"{bundle!r}, tensor {name!r}"
            if name not in left[bundle] or name not in right[bundle]:
                return f"only one of them has bundle {where}"
            one, other = left[bundle][name], right[bundle][name]
            if one.shape != other.shape or one.dtype != other.dtype:
                kinds = " and ".join(f"{tuple(t.shape)} {t.dtype}" for t in (one, other))
                return f"bundle {where} has shapes {kinds}"
            distance = float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
            if not same_bits(one, other) if tolerance is None else not distance <= tolerance:
                return f"bundle {where} differs by up to {distance:.3g}"
    return None


def require_same(
    left: Parcel, right: Parcel, expected: str, hint: str, tolerance: float | None = None, what: str = "server state"
) -> None:
    found = describe_difference(left, right, tolerance)
    if found:
        raise Broken(expected, f"{what}: {found}", hint)


def require_same_states(
    left: Mapping[str, Parcel], right: Mapping[str, Parcel], expected: str, hint: str, tolerance: float | None = None
) -> None:
    if left.keys() != right.keys():
        raise Broken(expected, f"states of devices {sorted(left)} and of {sorted(right)}", hint)
    for name, parcel in left.items():
        require_same(parcel, right[name], expected, hint, tolerance, f"state of device {name}")


def copy_parcel(parcel: Parcel) -> dict[str, dict[str, Tensor]]:
    return {bundle: {name: tensor.clone() for name, tensor in one.items()} for bundle, one in parcel.items()}


def reload_parcel(parcel: Parcel) -> dict[str, dict[str, Tensor]]:
    """Through a file, which does not keep the order of names: they come back reversed here."""
    return {bundle: dict(sorted(load(save(dict(tensors))).items(), reverse=True)) for bundle, tensors in parcel.items()}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Global generators that nothing may draw from, in a state of their own."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
