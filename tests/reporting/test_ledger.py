"""The ledger of claims: entries are merged and never lost, and only one section of the page is written."""

import json
import math
from pathlib import Path
from typing import Any

from fedloom.reporting.ledger import (
    SECTION_END,
    SECTION_START,
    SEED_KEYS,
    ClaimResult,
    full_size_entry,
    measured_text,
    read_ledger,
    update_claim_texts,
    update_full_size,
    update_ledger,
    write_claims_section,
    write_full_size_section,
)
from fedloom.reporting.targets import Amount


def entry(name: str, verdict: str = "holds") -> dict[str, Any]:
    measured = {"text": "x 1.00 [0.50–2.00]; y 0.00", "agreeing_seeds": 5}
    return {
        "claim": name, "paper": "P", "statement": f"{name} | said.", "published": "2 against 1", "measured": measured,
        "seeds": [0, 1, 2, 3, 4], "verdict": verdict, "command": f"fedloom reproduce --claim {name}",
        "wall_seconds": 90.0, "commit": None, "recipe": "reduced/one.toml",
    }  # fmt: skip


def test_update_ledger_keeps_other_entries(tmp_path: Path) -> None:
    path = tmp_path / "docs" / "results.json"
    update_ledger(path, [entry("b")], {"two.toml": {"torch": "1"}}, ["a", "b"])
    update_ledger(path, [entry("a", "within noise")], {"one.toml": {"torch": "2"}}, ["a", "b"])
    update_ledger(path, [entry("b", "does not hold")], {"two.toml": {"torch": "3"}}, ["a", "b"])
    said = read_ledger(path)
    assert [(one["claim"], one["verdict"]) for one in said["claims"]] == [("a", "within noise"), ("b", "does not hold")]
    assert said["comparisons"] == {"one.toml": {"torch": "2"}, "two.toml": {"torch": "3"}}
    assert json.loads(path.read_text())["schema_version"] == 1


def test_update_ledger_keeps_earlier_verdicts_of_other_runs(tmp_path: Path) -> None:
    """The same runs again are no news; a longer comparison is, and its predecessor stays visible."""
    path, old = tmp_path / "results.json", entry("a", "within noise")
    longer = {**entry("a"), "recipe": "reduced/two.toml", "measured": {**old["measured"], "text": "x 2.00; y 1.00"}}
    for one in (old, old, longer, longer):
        update_ledger(path, [one], {}, ["a"])
    (made,) = read_ledger(path)["claims"]
    earlier = {"verdict": "within noise", "recipe": "reduced/one.toml", "commit": None}
    assert made["verdict"] == "holds"
    assert made["earlier"] == [{**earlier, "measured": old["measured"]["text"]}]
    write_claims_section(tmp_path / "results.md", [made], 0, {})
    assert "`a` was before: within noise (`reduced/one.toml`: x 1.00" in (tmp_path / "results.md").read_text()


def full_size(
    row: str, published: float | None, measured: float | None, rounds: int = 200, seeds: tuple[int, ...] = (0, 1)
) -> dict[str, Any]:
    about = {"row": row, "paper": "P, Table 1", "of": 200, "what": "accuracy", "published": published}
    run = {"measured": measured, "last": measured, "rounds": rounds, "seconds": 900.0, "commit": None, "date": "2026"}
    return full_size_entry(about, [{**run, "seed": seed} for seed in seeds])


def test_update_full_size_merges_by_row_and_number(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    update_ledger(path, [entry("a")], {"one.toml": {}}, ["a"])
    update_full_size(path, [full_size("b", 98.66, 98.0), full_size("b", 98.66, 98.0) | {"what": "loss"}], ["a", "b"])
    rows = update_full_size(path, [full_size("a", 99.0, 98.9), full_size("b", 98.66, 98.63)], ["a", "b"])
    assert [(one["row"], one["what"], one["measured"]) for one in rows] == [
        ("a", "accuracy", 98.9),
        ("b", "accuracy", 98.63),
        ("b", "loss", 98.0),
    ]
    update_ledger(path, [entry("c")], {}, ["a", "c"])
    assert read_ledger(path)["full_size"] == rows and len(read_ledger(path)["claims"]) == 2


def test_update_full_size_adds_seeds_of_another_machine(tmp_path: Path) -> None:
    """Those of both, means over all of them; a run that got less far replaces nothing."""
    path = tmp_path / "results.json"
    update_full_size(path, [full_size("e", 98.66, 98.0, seeds=(0, 1))], ["e"])
    (row,) = update_full_size(path, [full_size("e", 98.66, 98.6, seeds=(1, 2))], ["e"])
    assert (row["seeds"], row["measured"], row["seconds"]) == ([0, 1, 2], 98.4, 2700.0)
    assert row["command"] == "fedloom reproduce e --full --seeds 3"
    (same,) = update_full_size(path, [full_size("e", 98.66, 10.0, rounds=9, seeds=(0,))], ["e"])
    assert same == row
    (longer,) = update_full_size(path, [{**full_size("e", 98.66, 99.0, seeds=(0,)), "of": 100}], ["e"])
    assert longer["seeds"] == [0]  # the recipe has another length now


def test_full_size_entry_unfinished_counts_only_alone() -> None:
    begun, whole = full_size("e", 98.66, 50.0, rounds=9), full_size("e", 98.66, 98.0, seeds=(1,))
    assert (begun["seeds"], begun["rounds"], begun["measured"]) == ([0], 9, 50.0)
    both = full_size_entry({key: begun[key] for key in SEED_KEYS if key in begun}, begun["by_seed"] + whole["by_seed"])
    assert (both["seeds"], both["rounds"], both["measured"]) == ([1], 200, 98.0)


def test_write_full_size_section_has_differences_and_analyses(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    rows = [full_size("e", 98.66, 98.63), full_size("d", 99.0, 97.0), full_size("c", 99.0, 50.0, rounds=9)]
    for _ in range(2):
        write_full_size_section(page, [*rows, full_size("b", None, 98.0)], {"d": "because of this"})
    text = page.read_text(encoding="utf-8")
    assert "4 rows; of 2 published numbers whose runs are finished, 1 are within 0.5" in text
    assert "| 98.66 | 98.63 | -0.03 | 98.63 | 200 | 0, 1 | 0.50 | - |" in text
    assert "| 9 of 200 |" in text and "| - | 98.00 | - |" in text
    assert text.count("`d`: because of this") == 1 and "`e`: not" not in text and "`c`: not" not in text


def test_update_ledger_keeps_claims_that_are_no_longer_listed(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    update_ledger(path, [entry("gone")], {}, ["gone"])
    assert [one["claim"] for one in update_ledger(path, [entry("a")], {}, ["a"])] == ["a", "gone"]


def test_read_ledger_without_file_is_empty(tmp_path: Path) -> None:
    assert read_ledger(tmp_path / "results.json")["claims"] == []


def test_write_claims_section_changes_only_text_between_marks(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text(f"# Results\n\nby hand\n\n{SECTION_START}\nstale\n{SECTION_END}\n\n## Later\n", encoding="utf-8")
    for _ in range(2):
        write_claims_section(page, [entry("a"), entry("b", "does not hold")], 3, {"b": "because of this"})
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# Results\n\nby hand\n\n{SECTION_START}\n")
    assert text.endswith(f"{SECTION_END}\n\n## Later\n")
    assert "stale" not in text
    assert "2 claims evaluated (1 holds, 1 does not hold, 0 within noise), 3 not yet" in text
    row = (
        "| `a`: a \\| said. | P | 2 against 1 | `reduced/one.toml` | x 1.00 [0.50–2.00]; y 0.00 | 5 of 5 | **holds** |"
    )
    assert row + " not measured | 1.5 | - |" in text
    assert "`b` (does not hold): because of this" in text


def test_write_claims_section_shows_targets(tmp_path: Path) -> None:
    one = entry("a")
    one["measured"]["targets"] = {"small": 78.9, "large": 61.64, "all": 78.9}
    write_claims_section(tmp_path / "results.md", [one], 0, {})
    assert "y 0.00 (target 78.9 and 61.64) |" in (tmp_path / "results.md").read_text(encoding="utf-8")


def test_update_claim_texts_keeps_numbers(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    update_ledger(path, [entry("a"), entry("gone")], {"one.toml": {"torch": "1"}}, ["a", "gone"])
    reworded = update_claim_texts(path, {"a": {"statement": "Better said."}, "new": {"statement": "Not decided."}})
    assert reworded == [{**entry("a"), "statement": "Better said."}, entry("gone")]
    assert json.loads(path.read_text()) == {
        "schema_version": 1,
        "claims": reworded,
        "comparisons": {"one.toml": {"torch": "1"}},
    }
    assert update_claim_texts(tmp_path / "none.json", {}) == []
    assert not (tmp_path / "none.json").exists()


def test_write_claims_section_without_marks_appends_them(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text("# Results\n\nby hand\n", encoding="utf-8")
    write_claims_section(page, [entry("a")], 0, {})
    assert page.read_text(encoding="utf-8").startswith(f"# Results\n\nby hand\n\n{SECTION_START}")
    write_claims_section(tmp_path / "new.md", [entry("a")], 0, {})
    assert (tmp_path / "new.md").read_text(encoding="utf-8").startswith(f"# Results\n\n{SECTION_START}")


def test_measured_text_has_median_and_range() -> None:
    result = ClaimResult([Amount(80.0), Amount(82.0), Amount(81.0)], [Amount(70.0)] * 3, [10.0, 12.0, 11.0], "holds", 3)
    assert measured_text(result, "last", ("x", "y")) == (
        "x 81.00 [80.00–82.00]; y 70.00 [70.00–70.00]; paired +11.00 [+10.00 to +12.00]"
    )
    sides = [Amount(5), Amount(6)], [Amount(9, exact=False), Amount(8)]
    never = ClaimResult(*sides, [float("-inf"), -2.0], "holds", 2)
    assert measured_text(never, "rounds", ("x", "y")).endswith("y >8.5 [8–>9] rounds; paired sooner [sooner to -2]")
    unknown = ClaimResult([Amount(math.nan)], [Amount(2.0)], [math.nan], "within noise", 0)
    assert measured_text(unknown, "gain", ("x", "y")) == "x not measured; y 2.00 [2.00–2.00] times"
