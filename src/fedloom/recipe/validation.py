"""Check the names and settings of a recipe.

Settings are checked against the signature of the function or dataclass they belong to: it is their only schema.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ..evaluation import BatchNormStatistics, FineTune
from ..registry import accepts_any_keyword, settable_parameters, suggest
from .errors import KeyPath, RecipeIssue, issue_from_pydantic
from .registries import PASSED, Registries
from .schema import AggregationConfig, DataConfig, EngineConfig, ModelConfig, TierConfig

PASSED_TO_EVALUATION = ("task",)  # what fedloom passes itself


def validate_recipe(document: Mapping[str, Any], registries: Registries) -> list[RecipeIssue]:
    """Check names and settings on the unparsed document, so that one invalid section does not hide another's issues."""
    sections = {name: value for name, value in document.items() if isinstance(value, Mapping)}
    tiers = [tier for tier in _as_list(document.get("tiers")) if isinstance(tier, Mapping)]
    names = [str(tier.get("name")) for tier in tiers]
    evaluation = sections.get("evaluation", {})
    issues = _validate_data(sections.get("data", {}), registries)
    issues += _validate_task(sections.get("task", {}), registries)
    issues += _validate_training(sections.get("training", {}), registries)
    issues += _validate_models(sections.get("model", {}), tiers, registries)
    issues += _validate_tiers(tiers, names, sections.get("fleet", {}), sections.get("engine", {}))
    if "method" in sections:
        issues += validate_choice(registries.methods, sections["method"], ("method",), key="name")
        issues += _validate_method_parts(sections["method"], names, registries)
    issues += _validate_engine(sections.get("engine", {}), registries)
    issues += _validate_aggregation(sections.get("aggregation", {}), registries)
    issues += _validate_compression(sections.get("compression", {}), registries)
    issues += _validate_faults(sections.get("faults", {}), names, registries)
    issues += _validate_metrics(evaluation.get("metrics"), registries)
    for key, function in (("statistics", BatchNormStatistics), ("fine_tune", FineTune)):
        if isinstance(settings := evaluation.get(key, {}), Mapping):
            issues += validate_settings(function, settings, ("evaluation", key), PASSED_TO_EVALUATION)
    return issues


def validate_choice(
    table: Mapping[str, Callable[..., Any]],
    settings: Mapping[str, Any],
    key_path: KeyPath,
    key: str = "kind",
    passed: Iterable[str] = (),
    other_keys: Iterable[str] = (),
) -> list[RecipeIssue]:
    """Check that `settings[key]` is a name of the table, and the other settings against that entry."""
    name, options = settings.get(key), {option: value for option, value in settings.items() if option != key}
    if name is None:
        return [RecipeIssue((*key_path, key), "RECIPE_MISSING", f"{key} is required", suggest("", table))]
    if not isinstance(name, str) or name not in table:
        kind = str(key_path[-1]) if key != "dataset" else "data set"
        return [_unknown_name((*key_path, key), kind, name, table)]
    return validate_settings(table[name], options, key_path, passed, [key, *other_keys])


def validate_settings(
    function: Callable[..., Any],
    settings: Mapping[str, Any],
    key_path: KeyPath,
    passed: Iterable[str] = (),
    other_keys: Iterable[str] = (),
) -> list[RecipeIssue]:
    """Check settings against a function's signature.

    Parameters
    ----------
    passed: parameters that fedloom passes itself.
    other_keys: keys of the same section that belong to something else, for hints.
    """
    allowed, hints = settable_parameters(function, passed), type_hints(function)
    issues = []
    for name, value in settings.items():
        if name in allowed:
            issues += _validate_value(hints.get(name, Any), value, (*key_path, name))
        elif not accepts_any_keyword(function) or not isinstance(name, str):
            hint = suggest(str(name), [*allowed, *other_keys])
            issues.append(RecipeIssue((*key_path, name), "RECIPE_KEY", f"there is no key {name!r} here", hint, value))
    required = [name for name in _required_settings(function, passed) if name not in settings]
    return issues + [RecipeIssue((*key_path, name), "RECIPE_MISSING", f"{name} is required") for name in required]


def _required_settings(function: Callable[..., Any], passed: Iterable[str]) -> list[str]:
    return [name for name, p in settable_parameters(function, passed).items() if p.default is p.empty]


def instantiate(
    table: Mapping[str, Callable[..., Any]], settings: Mapping[str, Any], key: str = "kind"
) -> Callable[..., Any]:
    """The table's entry `settings[key]` with the other settings as keyword arguments, which have been validated."""
    return partial(table[settings[key]], **{name: value for name, value in settings.items() if name != key})


def as_tuples(value: Any) -> Any:
    """A copy with tuples instead of lists, which settings and the schema expect where TOML has arrays."""
    if isinstance(value, list | tuple):
        return tuple(as_tuples(item) for item in value)
    if isinstance(value, Mapping):
        return {key: as_tuples(item) for key, item in value.items()}
    return value


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _unknown_name(key_path: KeyPath, kind: str, name: Any, known: Iterable[str]) -> RecipeIssue:
    message = f"there is no {kind} of that name"
    return RecipeIssue(key_path, "RECIPE_NAME", message, suggest(str(name), known), name)


def _validate_value(hint: Any, value: Any, key_path: KeyPath) -> list[RecipeIssue]:
    try:
        TypeAdapter(hint).validate_python(as_tuples(value), strict=True)
    except ValidationError as error:
        if _is_union(hint) and len(error.errors()) > 1:  # pydantic reports an error for each member of the union
            message = f"{key_path[-1]} has none of the forms it can have"
            return [RecipeIssue(key_path, "RECIPE_TYPE", message, value=value)]
        return [issue_from_pydantic(detail, (), key_path) for detail in error.errors()]
    return []


def _is_union(hint: Any) -> bool:
    """True for a union of at least two types besides None."""
    return len([one for one in get_args(hint) if one is not NoneType]) > 1 and get_origin(hint) in (Union, UnionType)


def type_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The types of a function's parameters, with what is annotated beside them."""
    function = function.func if isinstance(function, partial) else function
    try:
        return get_type_hints(function.__init__ if inspect.isclass(function) else function, include_extras=True)
    except (NameError, TypeError):  # an annotation of the user's that does not resolve: accept any value
        return {}


def _validate_data(data: Mapping[str, Any], registries: Registries) -> list[RecipeIssue]:
    fields = DataConfig.model_fields
    reader = {key: value for key, value in data.items() if key == "dataset" or key not in fields}
    reader.setdefault("dataset", fields["dataset"].default)
    issues = validate_choice(registries.datasets, reader, ("data",), "dataset", PASSED["datasets"], fields)
    if isinstance(partition := data.get("partition"), Mapping):
        issues += validate_choice(registries.partitions, partition, ("data", "partition"), passed=PASSED["partitions"])
    public = data.get("public")
    if isinstance(public, Mapping) and public.get("source") == "dataset":
        name = public.get("dataset")
        if not isinstance(name, str) or name not in registries.datasets:
            issues.append(_unknown_name(("data", "public", "dataset"), "data set", name, registries.datasets))
        elif required := _required_settings(registries.datasets[name], PASSED["datasets"]):
            message = f"{name} needs {', '.join(required)}, and data.public has no settings of a data set"
            issues.append(RecipeIssue(("data", "public", "dataset"), "RECIPE_VALUE", message, value=name))
    preparation = data.get("preparation")
    if isinstance(preparation, str) and preparation not in registries.preparations:
        issues.append(_unknown_name(("data", "preparation"), "preparation", preparation, registries.preparations))
    return issues


def _validate_task(task: Mapping[str, Any], registries: Registries) -> list[RecipeIssue]:
    kind = task.get("kind")
    if not isinstance(kind, str) or kind in registries.tasks:
        return []
    return [_unknown_name(("task", "kind"), "task", kind, registries.tasks)]


def _validate_training(training: Mapping[str, Any], registries: Registries) -> list[RecipeIssue]:
    issues = []
    tables = {"optimizer": registries.optimizers, "lr_schedule": registries.lr_schedules, "loss": registries.losses}
    for key, table in tables.items():
        if isinstance(training.get(key), Mapping):
            issues += validate_choice(table, training[key], ("training", key), passed=PASSED["losses"])
    return issues


def _validate_models(
    model: Mapping[str, Any], tiers: Sequence[Mapping[str, Any]], registries: Registries
) -> list[RecipeIssue]:
    """The common settings and each tier's; a tier with its own family does not use the common ones."""
    family = model.get("family", ModelConfig.model_fields["family"].default)
    families: dict[KeyPath, Any] = {("model", "family"): family}
    families |= {("tiers", n, "family"): tier["family"] for n, tier in enumerate(tiers) if "family" in tier}
    unknown = [
        _unknown_name(key_path, "model family", name, registries.models)
        for key_path, name in families.items()
        if not isinstance(name, str) or name not in registries.models
    ]
    if unknown:
        return unknown
    common = {key: value for key, value in model.items() if key != "family"}
    issues = validate_settings(registries.models[family], common, ("model",), PASSED["models"], ["family"])
    missing = {issue.key_path[-1]: issue for issue in issues if issue.code == "RECIPE_MISSING"}
    issues = [issue for issue in issues if issue.code != "RECIPE_MISSING"]
    for number, tier in enumerate(tiers):
        settings = {key: value for key, value in tier.items() if key not in TierConfig.model_fields}
        build = registries.models[tier.get("family", family)]
        of_tier = validate_settings(build, settings, ("tiers", number), PASSED["models"], TierConfig.model_fields)
        if "family" in tier:
            issues += of_tier
            continue
        issues += [issue for issue in of_tier if issue.code != "RECIPE_MISSING"]
        issues += [issue for name, issue in missing.items() if name not in settings]
    return issues


def _validate_tiers(
    tiers: Sequence[Mapping[str, Any]], names: Sequence[str], fleet: Mapping[str, Any], engine: Mapping[str, Any]
) -> list[RecipeIssue]:
    issues = []
    shares = [tier.get("share") for tier in tiers]
    if shares and all(isinstance(share, int | float) and not isinstance(share, bool) for share in shares):
        total = math.fsum(float(share) for share in shares)  # type: ignore[arg-type]
        if abs(total - 1) > 1e-6:
            hint = f"they sum to {total:g}; a share is the fraction of all devices that belongs to the tier"
            issues.append(RecipeIssue(("tiers",), "RECIPE_SHARES", "the tiers' shares must sum to 1", hint))
    for number, name in enumerate(names):
        if name in names[:number] and "name" in tiers[number]:
            issues.append(RecipeIssue(("tiers", number, "name"), "RECIPE_VALUE", "two tiers of one name", value=name))
    for key_path, used in (
        (("fleet", "eligible"), fleet.get("eligible")),
        (("fleet", "device_tiers"), fleet.get("device_tiers")),
        (("engine", "devices_per_block"), engine.get("devices_per_block")),
    ):
        for name in used if isinstance(used, list | tuple | Mapping) else ():
            if name not in names:
                issues.append(_unknown_name(key_path, "tier", name, names))
    return issues


def _validate_method_parts(
    method: Mapping[str, Any], tiers: Sequence[str], registries: Registries
) -> list[RecipeIssue]:
    """The parts of a method composed of others: each has tiers and a method with its settings."""
    issues = []
    for number, part in enumerate(_as_list(method.get("parts"))):
        key_path = ("method", "parts", number)
        if not isinstance(part, Mapping):
            issues.append(RecipeIssue(key_path, "RECIPE_TYPE", "a part is a table with tiers and a method", value=part))
            continue
        settings = {key: value for key, value in part.items() if key not in ("tiers", "align")}
        issues += validate_choice(registries.methods, settings, key_path, key="method", other_keys=("tiers", "align"))
        issues += validate_settings(_part, {key: part[key] for key in ("tiers", "align") if key in part}, key_path)
        issues += [
            _unknown_name((*key_path, "tiers"), "tier", name, tiers)
            for name in _as_list(part.get("tiers"))
            if name not in tiers
        ]
    return issues


def _part(tiers: tuple[str, ...], align: bool = False) -> None:
    """The settings of a part besides its method and that method's settings."""


def _validate_metrics(metrics: Any, registries: Registries) -> list[RecipeIssue]:
    """Each is a name, or a table with a name and settings."""
    issues = []
    for number, metric in enumerate(_as_list(metrics)):
        key_path = ("evaluation", "metrics", number)
        if not isinstance(metric, str | Mapping):
            issues.append(RecipeIssue(key_path, "RECIPE_TYPE", "a metric is a name or a table", value=metric))
            continue
        settings = {"kind": metric} if isinstance(metric, str) else metric
        table: Mapping[str, Any] = registries.metrics
        known = settings.get("kind")
        if isinstance(known, str) and known in table and not callable(table[known]):
            table = {known: _no_settings}
        for issue in validate_choice(table, settings, key_path, passed=PASSED["metrics"]):
            if issue.code == "RECIPE_NAME":
                where = key_path if isinstance(metric, str) else issue.key_path
                issue = replace(issue, message="there is no metric of that name", key_path=where)
            issues.append(issue)
    return issues


def _no_settings() -> None:
    """A metric that is an object has none."""


def _validate_engine(engine: Mapping[str, Any], registries: Registries) -> list[RecipeIssue]:
    fields = EngineConfig.model_fields
    settings = {key: value for key, value in engine.items() if key == "kind" or key not in fields}
    settings = {"kind": fields["kind"].default, **settings}
    return validate_choice(registries.engines, settings, ("engine",), "kind", PASSED["engines"], fields)


def _validate_aggregation(aggregation: Mapping[str, Any], registries: Registries) -> list[RecipeIssue]:
    fields = AggregationConfig.model_fields
    settings = {key: value for key, value in aggregation.items() if key == "rule" or key not in fields}
    settings = {"rule": fields["rule"].default, **settings}
    issues = validate_choice(registries.aggregation, settings, ("aggregation",), "rule", other_keys=fields)
    if isinstance(optimizer := aggregation.get("server_optimizer"), Mapping):
        issues += validate_choice(registries.server_optimizers, optimizer, ("aggregation", "server_optimizer"))
    return issues


def _validate_compression(compression: Mapping[str, Any], registries: Registries) -> list[RecipeIssue]:
    issues = []
    for key in ("uplink", "downlink"):
        settings, key_path = compression.get(key), ("compression", key)
        if not isinstance(settings, Mapping):
            continue
        of_key = [
            replace(issue, message="there is no compressor of that name") if issue.code == "RECIPE_NAME" else issue
            for issue in validate_choice(registries.compressors, settings, key_path)
        ]
        if key == "downlink" and not of_key and instantiate(registries.compressors, settings)().of_updates:
            name, downlink = settings["kind"], [n for n, f in registries.compressors.items() if not _of_updates(f)]
            message = f"{name} compresses updates, so it is for the uplink only"
            of_key = [RecipeIssue((*key_path, "kind"), "RECIPE_NAME", message, suggest("", downlink), name)]
        issues += of_key
    return issues


def _of_updates(compressor: Callable[..., Any]) -> bool:
    """True for a class that says so; a function's result is not known without its settings."""
    return bool(getattr(compressor, "of_updates", False))


def _validate_faults(faults: Mapping[str, Any], tiers: Sequence[str], registries: Registries) -> list[RecipeIssue]:
    issues = []
    if isinstance(stragglers := faults.get("stragglers"), Mapping):
        issues += validate_choice(
            registries.stragglers, stragglers, ("faults", "stragglers"), passed=PASSED["stragglers"]
        )
    for number, outage in enumerate(_as_list(faults.get("outages"))):
        if isinstance(outage, Mapping) and "tier" in outage and outage["tier"] not in tiers:
            issues.append(_unknown_name(("faults", "outages", number, "tier"), "tier", outage["tier"], tiers))
    return issues
