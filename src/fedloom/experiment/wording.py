"""Checks of a recipe's words: every name is known, and every setting is one its thing has, in type and range."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..data import PARTITIONS, PREPARATIONS
from ..evaluation import StaticBatchNorm
from ..training import OPTIMISERS, RATES
from .choices import checked, chosen
from .problems import Problem, nearest
from .recipe import Data
from .tables import Tables

HANDED_TO_FAMILIES = ("input_shape", "classes", "widest")
HANDED_TO_PARTITIONS = ("labels", "devices", "generator")


def wording_problems(document: Mapping[str, Any], tables: Tables) -> list[Problem]:
    """On the document as it was read, so that one bad part does not hide another."""
    parts = {name: value for name, value in document.items() if isinstance(value, Mapping)}
    tiers = [tier for tier in document.get("tiers", ()) if isinstance(tier, Mapping)]
    problems = _data(parts.get("data", {}), tables)
    problems += _training(parts.get("training", {}))
    problems += _models(parts.get("model", {}), tiers, tables)
    problems += _tiers(tiers, parts.get("fleet", {}))
    if "method" in parts:
        problems += chosen(tables.methods, parts["method"], ("method",), key="name")[2]
    statistics = parts.get("evaluation", {}).get("statistics", {})
    if isinstance(statistics, Mapping):
        problems += checked(StaticBatchNorm, statistics, ("evaluation", "statistics"))[1]
    return problems


def _data(data: Mapping[str, Any], tables: Tables) -> list[Problem]:
    problems = []
    own = {key: value for key, value in data.items() if key == "dataset" or key not in Data.model_fields}
    if "dataset" in own:
        problems += chosen(tables.datasets, own, ("data",), key="dataset", given=("folder",))[2]
    if isinstance(data.get("partition"), Mapping):
        problems += chosen(PARTITIONS, data["partition"], ("data", "partition"), given=HANDED_TO_PARTITIONS)[2]
    preparation = data.get("preparation")
    if preparation is not None and preparation not in PREPARATIONS:
        hint = nearest(str(preparation), PREPARATIONS)
        place = ("data", "preparation")
        problems.append(Problem(place, "RECIPE_NAME", "there is no preparation of that name", hint, preparation))
    return problems


def _training(training: Mapping[str, Any]) -> list[Problem]:
    problems = []
    for key, table in (("optimiser", OPTIMISERS), ("rates", RATES)):
        if isinstance(training.get(key), Mapping):
            problems += chosen(table, training[key], ("training", key))[2]
    return problems


def _models(model: Mapping[str, Any], tiers: Sequence[Mapping[str, Any]], tables: Tables) -> list[Problem]:
    family = model.get("family", "convnet")
    if family not in tables.models:
        hint = nearest(str(family), tables.models)
        return [Problem(("model", "family"), "RECIPE_NAME", "there is no model family of that name", hint, family)]
    common = {key: value for key, value in model.items() if key != "family"}
    problems = _family_problems(tables.models[family], common, ("model",), complete=False)
    for number, tier in enumerate(tiers):
        own = {key: value for key, value in tier.items() if key not in ("name", "share")}
        problems += _family_problems(tables.models[family], own, ("tiers", number), complete=False)
    if not problems:
        for tier in tiers[:1]:
            both = {**common, **{key: value for key, value in tier.items() if key not in ("name", "share")}}
            problems += _family_problems(tables.models[family], both, ("model",), complete=True)
    return problems


def _family_problems(
    family: Any, settings: Mapping[str, Any], place: tuple[str | int, ...], complete: bool
) -> list[Problem]:
    found = checked(family, settings, place, given=HANDED_TO_FAMILIES)[1]
    return [problem for problem in found if complete or problem.code != "RECIPE_MISSING"]


def _tiers(tiers: Sequence[Mapping[str, Any]], fleet: Mapping[str, Any]) -> list[Problem]:
    problems = []
    names = [str(tier.get("name")) for tier in tiers]
    shares = [tier.get("share") for tier in tiers]
    if shares and all(isinstance(share, int | float) and not isinstance(share, bool) for share in shares):
        total = math.fsum(float(share) for share in shares)  # type: ignore[arg-type]
        if abs(total - 1) > 1e-6:
            hint = f"they sum to {total:g}; a share is the part of all devices that belongs to the tier"
            problems.append(Problem(("tiers",), "RECIPE_SHARES", "the tiers' shares must sum to 1", hint))
    for number, name in enumerate(names):
        if name in names[:number]:
            problems.append(Problem(("tiers", number, "name"), "RECIPE_VALUE", "two tiers of one name", value=name))
    for name in fleet.get("eligible", ()):
        if name not in names:
            hint = nearest(str(name), names)
            problems.append(Problem(("fleet", "eligible"), "RECIPE_NAME", "there is no tier of that name", hint, name))
    return problems
