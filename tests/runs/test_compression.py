"""Compression in a recipe: what is refused, what is reported, and that results do not depend on workers or resuming."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.analysis.costs import tier_costs
from fedloom.engines import Compression, ServerEnd
from fedloom.engines.compression import HalfPrecision, Int8, TopK
from fedloom.fleet import Exchange, Request
from fedloom.recipe.errors import RecipeError
from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries
from fedloom.runs.build import assemble, build_compression
from fedloom.runs.experiment import Experiment
from fedloom.runs.folder import read_manifest
from fedloom.runs.loop import rounds
from fedloom.runs.recorder import record_rounds
from fedloom.runs.resume import reopen_run, verify
from fedloom.studies.attack_bench import build_attack_bench
from fedloom.tensors import fingerprint

TOP = {"kind": "top_k", "share": 0.1}
BOTH = {"uplink": TOP, "downlink": {"kind": "int8"}}
FEW = {"dataset": "digits", "devices": 4, "max_examples": 20, "test_examples": 20}
FAST = [
    {"name": "large", "share": 0.5, "width": 1.0, "speed": 1e30, "bandwidth": 1e4},
    {"name": "small", "share": 0.5, "width": 0.5, "speed": 1e30, "bandwidth": 1e4},
]


@pytest.fixture
def made(document: Callable[..., dict[str, Any]], tmp_path: Path) -> Callable[..., Experiment]:
    def make(**changes: Any) -> Experiment:
        return assemble(load(document(**{"data": FEW, **changes}), Registries()), Registries(), tmp_path)

    return make


def prints(run: Any) -> tuple[str, str]:
    manifest = read_manifest(run.folder)
    return manifest["sha256"], manifest["devices_sha256"]


def values(run: Any, metric: str) -> list[float]:
    return [row.value for row in run.rows() if row.metric == metric]


def test_build_compression_recipe_settings_are_used(document: Callable[..., dict[str, Any]]) -> None:
    def compression(**settings: Any) -> Compression | None:
        return build_compression(load(document(compression=settings), Registries()).recipe, Registries())

    assert compression() is None
    assert compression(uplink={"kind": "int8", "scale": "tensor"}) == Compression(Int8("tensor"))
    assert compression(uplink={"kind": "top_k", "share": 0.5, "error_feedback": False}) == Compression(TopK(0.5, False))
    found = compression(downlink={"kind": "float16"})
    assert found is not None
    assert isinstance(found.downlink, HalfPrecision)
    assert found.uplink is None


WRONG: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "a name": ({"uplink": {"kind": "int9"}}, "compression.uplink.kind", "RECIPE_NAME", "did you mean 'int8'?"),
    "no name": ({"downlink": {}}, "compression.downlink.kind", "RECIPE_MISSING", "known: bfloat16, float16, int8"),
    "a way": ({"sideways": {"kind": "int8"}}, "compression.sideways", "RECIPE_KEY", ""),
    "updates come up": (
        {"downlink": TOP},
        "compression.downlink.kind",
        "RECIPE_NAME",
        "known: bfloat16, float16, int8",
    ),
    "no share": ({"uplink": {"kind": "top_k"}}, "compression.uplink.share", "RECIPE_MISSING", ""),
    "a share": ({"uplink": {"kind": "top_k", "share": 1.5}}, "compression.uplink.share", "RECIPE_RANGE", ""),
    "a setting": (
        {"uplink": {"kind": "top_k", "shares": 0.5, "share": 0.5}},
        "compression.uplink.shares",
        "RECIPE_KEY",
        "share",
    ),
    "a scale": ({"downlink": {"kind": "int8", "scale": "column"}}, "compression.downlink.scale", "RECIPE_VALUE", ""),
    "no table": ({"uplink": "int8"}, "compression.uplink", "RECIPE_TYPE", ""),
}


@pytest.mark.parametrize(("settings", "place", "code", "hint"), WRONG.values(), ids=WRONG)
def test_load_bad_compression_is_refused_with_key_and_hint(
    settings: dict[str, Any], place: str, code: str, hint: str, document: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(RecipeError) as found:
        load(document(compression=settings), Registries())
    (problem,) = found.value.issues
    assert (".".join(map(str, problem.key_path)), problem.code) == (place, code)
    assert hint in problem.hint


PRIVATE: dict[str, Any] = {
    "fleet": {"participation": 0.5, "sampling": "poisson"},
    "model": {"family": "convnet", "hidden": [2, 4], "normalization": "group"},
    "method": {"name": "heterofl", "only_seen_rows": False},
    "privacy": {"clip": 1.0, "noise": 2.0},
}
MIXED = {"name": "mixed", "strength": 0.0, "parts": [{"tiers": ["large", "small"], "method": "fedrolex"}]}
UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "privacy": (PRIVATE, "PRIVACY_COMPRESSION"),
    "windows that roll": ({"method": {"name": "fedrolex"}}, "COMPRESSION_METHOD"),
    "largest weights": (
        {
            "method": {"name": "fiarse", "sizes": {"large": 1.0, "small": 0.25}},
            "tiers": [{"name": "large", "share": 0.5}, {"name": "small", "share": 0.5}],
        },
        "COMPRESSION_METHOD",
    ),
    "in a part too": ({"method": MIXED, "data": {**FEW, "public": {"examples": 10}}}, "COMPRESSION_METHOD"),
}


@pytest.mark.parametrize(("changes", "code"), UNFIT.values(), ids=UNFIT)
def test_check_compression_unfit_error_feedback_is_refused(
    changes: dict[str, Any], code: str, made: Callable[..., Experiment]
) -> None:
    with pytest.raises(RecipeError) as found:
        made(**changes, compression={"uplink": TOP})
    assert [(one.code, one.key_path) for one in found.value.issues] == [(code, ("compression", "uplink"))]
    for fit in ({**TOP, "error_feedback": False}, {"kind": "int8"}):
        made(**changes, compression={"uplink": fit, "downlink": {"kind": "int8"}})


@pytest.mark.parametrize("rule", ["median", "trimmed_mean"])
def test_check_compression_top_k_with_entrywise_rule_is_refused(rule: str, made: Callable[..., Experiment]) -> None:
    with pytest.raises(RecipeError) as found:
        made(aggregation={"rule": rule}, compression={"uplink": {**TOP, "error_feedback": False}})
    assert [one.code for one in found.value.issues] == ["COMPRESSION_AGGREGATION"]
    made(aggregation={"rule": rule}, compression={"uplink": {"kind": "int8"}})
    made(aggregation={"rule": "default"}, compression={"uplink": TOP})


def test_attack_bench_with_compression_is_refused(document: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as found:
        build_attack_bench(
            load(document(compression=BOTH), Registries()),
            Registries(),
            tmp_path,
            ["scaling"],
            ["default"],
            0.3,
            1,
            "global",
        )
    assert [one.code for one in found.value.issues] == ["COMPRESSION_TOO"]


def test_run_with_empty_compression_equals_uncompressed_run(run: Callable[..., Any]) -> None:
    plain, empty = run("plain", data=FEW), run("empty", compression={}, data=FEW)
    assert prints(plain) == prints(empty)
    assert plain.rows() == empty.rows()
    assert values(plain, "bytes_down_compressed") == values(plain, "bytes_up_compressed") == []


def test_run_compressed_reports_bytes_before_and_after(
    run: Callable[..., Any], document: Callable[..., Any], tmp_path: Path
) -> None:
    plain, coded = run("plain", data=FEW), run("coded", compression=BOTH, data=FEW)
    for way in ("bytes_down", "bytes_up"):
        assert values(plain, way) == values(coded, way)
        assert all(
            less < all_of_it
            for less, all_of_it in zip(values(coded, f"{way}_compressed"), values(coded, way), strict=True)
        )
    loaded = load(document(compression=BOTH, data=FEW), Registries())
    large, small = (one.record() for one in tier_costs(loaded, Registries(), tmp_path))
    assert (
        2 * (large["bytes_down_compressed"] + small["bytes_down_compressed"])
        == values(coded, "bytes_down_compressed")[-1]
    )
    assert 2 * (large["bytes_up_compressed"] + small["bytes_up_compressed"]) == values(coded, "bytes_up_compressed")[-1]


@pytest.mark.parametrize("faults", [{}, {"quorum": 0.1}], ids=["all is well", "devices may fail"])
def test_clock_compressed_run_counts_compressed_bytes(
    faults: dict[str, Any], run: Callable[..., Any], document: Callable[..., Any], tmp_path: Path
) -> None:
    coded = run(tiers=FAST, faults=faults, compression=BOTH, data=FEW)
    large, _ = tier_costs(load(document(compression=BOTH, data=FEW), Registries()), Registries(), tmp_path)
    assert large.bytes_down_compressed is not None
    assert large.bytes_up_compressed is not None
    assert (
        values(coded, "simulated_seconds")
        == [pytest.approx((large.bytes_down_compressed + large.bytes_up_compressed) / 1e4)] * 2
    )


def test_run_compressed_workers_and_repeats_change_no_bit(run: Callable[..., Any]) -> None:
    changes = {"compression": BOTH, "data": {**FEW, "devices": 8}, "rounds": 3}
    runs = [run("one", **changes), run("again", **changes), run("two", options={"workers": 2}, **changes)]
    assert len({prints(one) for one in runs}) == 1
    assert runs[0].rows() == runs[1].rows() == runs[2].rows()


def test_resume_compressed_run_gives_same_result(
    run: Callable[..., Any], document: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    changes: dict[str, Any] = {
        "compression": BOTH, "rounds": 5, "fleet": {"participation": 0.5}, "checkpoints": {"every": 1}, "data": FEW,
    }  # fmt: skip
    whole = run("whole", **changes)
    folder = tmp_path / "cut"
    experiment = assemble(load(document(**changes), Registries()), Registries(), tmp_path)
    going = record_rounds(experiment, folder)
    for _ in range(3):
        next(going)
    going.close()
    held = json.loads((folder / "checkpoints" / "000003.json").read_text())["owners"]
    assert any(owner.endswith(" left out") for owner in held)
    again, since = reopen_run(folder, Registries(), tmp_path, 1)
    assert [done.number for done in record_rounds(again, folder, since)] == [4, 5]
    assert read_manifest(folder)["sha256"] == prints(whole)[0]
    assert read_manifest(folder)["devices_sha256"] == prints(whole)[1]
    assert (folder / "rows.jsonl").read_bytes() == (whole.folder / "rows.jsonl").read_bytes()
    found = verify(folder, Registries(), tmp_path, 2, 1)
    assert (found.since, found.rounds, found.differences) == (3, 2, ())


def test_run_compressed_failed_round_keeps_residuals(made: Callable[..., Experiment]) -> None:
    experiment = made(
        compression=BOTH, rounds=3, data=FEW, faults={"outages": [{"tier": "large", "from": 2, "to": 3}], "quorum": 0.9}
    )
    client_states = experiment.client_states
    kept = []
    for _ in rounds(experiment):
        kept.append({name: fingerprint(parcel) for name, parcel in client_states.committed.items()})
    assert kept[0]
    assert kept[0] == kept[1] == kept[2]


def test_evaluation_of_compressed_run_is_uncompressed(
    made: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    open_exchange = ServerEnd.open

    def noting(self: ServerEnd, request: Request) -> Exchange:
        asked.append(request.task.name)
        return open_exchange(self, request)

    monkeypatch.setattr(ServerEnd, "open", noting)
    data = {**FEW, "public": {"examples": 10}}
    for _ in rounds(made(compression=BOTH, method={"name": "fedhenn", "probe_size": 5}, data=data)):
        pass
    assert set(asked) <= {"train", "describe", "train_at_home"}
    assert asked


@pytest.mark.parametrize(
    "changes",
    [
        {"admission": {"norm": 50.0}, "compression": BOTH},
        {"aggregation": {"rule": "default"}, "compression": BOTH, "data": {**FEW, "devices": 8}},
        {**PRIVATE, "compression": {"uplink": {"kind": "int8"}, "downlink": {"kind": "int8"}}},
        {
            "faults": {"dropout": 0.3, "corrupt": {"devices": 1}, "max_failed_rounds": 9},
            "compression": BOTH,
            "rounds": 3,
        },
        {"fleet": {"assignment": "redrawn"}, "compression": BOTH, "rounds": 3},
    ],
    ids=["norms", "aggregation", "privacy", "faults", "tiers that change"],
)
def test_run_compressed_works_with_other_features(changes: dict[str, Any], run: Callable[..., Any]) -> None:
    assert len(values(run(**{"data": FEW, **changes}), "bytes_up_compressed")) == changes.get("rounds", 2)
