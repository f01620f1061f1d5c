"""The lists of published rows and claims are complete, well formed, and every row can be built."""

import math
import re
from collections import Counter
from pathlib import Path

import pytest

from fedloom.evaluation import Row
from fedloom.recipe.errors import RecipeError
from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries
from fedloom.reporting.ledger import read_ledger
from fedloom.runs.build import build
from fedloom.runs.data import build_partition, read_data_spec
from fedloom.studies.published import Claim, PublishedNumber, measure_number, read_claims, read_published

RECIPES = Path(__file__).parents[2] / "recipes"
ROWS = read_published(RECIPES)
CLAIMS = read_claims(RECIPES)
TABLES = {  # rows with numbers, by table: as many as the paper prints, noside-trained-only and figures apart
    "heterofl_costs_table7": 31, "heterofl_costs_table8": 31, "heterofl_costs_table9": 31,
    "heterofl_table7_iid": 31, "heterofl_table7_noniid": 31, "heterofl_table8_iid": 31, "heterofl_table8_noniid": 31,
    "heterofl_table9": 31, "heterofl_table4_mnist": 17, "heterofl_table4_cifar10": 17, "heterofl_table5_mnist": 25,
    "heterofl_table5_cifar10": 25, "heterofl_table1_iid": 3, "heterofl_table1_noniid": 3, "heterofl_table2_iid": 3,
    "heterofl_table2_noniid": 3, "fedhen_table1_cifar10": 3, "fedhen_table1_cifar100": 3, "fedhen_table2_cifar10": 3,
    "fedhen_table2_cifar100": 3, "fedhen_centralized": 8, "fedsup_table1": 4, "efedsup_table1": 4,
    "fedsup_table2": 10, "fedsup_table3": 16, "fedsup_table6": 1, "fedsup_table7": 24, "efedsup_table8": 24,
    "fedsup_table9": 6, "fedsup_table10": 4, "fedsup_table11": 8, "fedsup_table12": 8, "fedsup_table13": 16,
    "fedsup_table14": 4, "fedsup_table15": 12, "fedsup_table16": 2, "fedsup_table17": 2, "fedsup_table19": 12,
    "fedhenn_table1": 18, "fedhenn_table2": 19, "fedhenn_table3": 5, "fedin_table2": 16, "pfllib_fashion": 14,
}  # fmt: skip


def printed(beginning: str) -> list[str]:
    rows = [row for row in ROWS.values() if any(number is not None for _, number in row.numbers)]
    return [row.name for row in rows if re.match(rf"{beginning}(_|$)", row.name)]


@pytest.mark.parametrize(("table", "count"), TABLES.items())
def test_published_tables_are_complete(table: str, count: int) -> None:
    assert len(printed(table)) == count


@pytest.mark.parametrize(
    ("figure", "curves"),
    {
        **{f"heterofl_figure{number}": 94 for number in ("2", "3", "4", "s5and7", "s6and8")},
        "heterofl_figure9": 40, "heterofl_figure10": 40, "heterofl_figure11": 20,
        "fedsup_figure4": 6, "fedsup_figure5": 2, "fedsup_figure6": 4, "fedsup_figure7": 2, "fedsup_figure10": 6,
        "fedhenn_figure1": 15, "fedhenn_figure3": 10, "fedin_figures5and6": 16, "fedin_figure7": 4,
    }.items(),
)  # fmt: skip
def test_published_figures_are_complete(figure: str, curves: int) -> None:
    assert sum(bool(re.match(rf"{figure}(_|$)", name)) for name in ROWS) == curves


def test_published_numbers_match_their_recipes() -> None:
    """Both were written down from the papers, one for people and one for programs. HeteroFL's image recipes print only
    the row that they are, and none what its modes cost."""
    missing = []
    for row in ROWS.values():
        text = row.recipe.read_text("utf-8")
        prints_all = "published" in text.lower() and not re.match(r"heterofl_(mnist|cifar10)", row.recipe.stem)
        for _, number in row.numbers if prints_all and not row.name.startswith("heterofl_costs") else ():
            if number is not None and not any(form in text for form in forms(number)):
                missing.append((row.name, number))
    assert missing == []


def forms(number: float) -> set[str]:
    return {f"{number:.2f}", f"{number:.1f}", f"{number:g}", f"{number / 1e6:.2f} M"}


def test_published_rows_are_distinct_and_named_like_folders() -> None:
    assert all(re.fullmatch(r"\w[\w.+-]*", name) for name in ROWS)
    settings = Counter((row.recipe, row.changes, row.numbers) for row in ROWS.values())
    assert len(ROWS) > 1000
    twice = [key for key, count in settings.items() if count > 1]
    assert all("figure" in row.name for row in ROWS.values() if (row.recipe, row.changes, row.numbers) in twice)


@pytest.mark.parametrize("name", list(ROWS)[::400])
def test_published_sample_of_rows_can_be_built(name: str, tmp_path: Path) -> None:
    can_be_run(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("paper", sorted({name.split("_")[0] for name in ROWS}))
def test_published_rows_can_all_be_built(paper: str, tmp_path: Path) -> None:
    for name in ROWS:
        if name.startswith(f"{paper}_"):
            can_be_run(name, tmp_path)


def can_be_run(name: str, folder: Path) -> None:
    """Build a row as `fedloom check` does, without the data."""
    registries, row = Registries(), ROWS[name]
    loaded = load(row.recipe, registries, row.changes)
    seen = read_data_spec(loaded, registries, folder)
    fleet, method = build(loaded, registries, seen)
    build_partition(loaded, Registries(), seen.labels)
    tiers = {"", "*", *(tier.name for tier in fleet.tiers)}
    assert all(number.tier in tiers for number, _ in row.numbers)
    if any(number.candidate for number, _ in row.numbers) and fleet.size < 100:  # else the server's state is large
        known = {"", *method.eval_targets(method.start(fleet, 0))}
        assert all(number.candidate in known for number, _ in row.numbers)


def test_claim_list_is_complete() -> None:
    by_paper = Counter(claim.paper for claim in CLAIMS.claims)
    assert CLAIMS.seeds == 5
    assert by_paper == {
        "FedHeN": 17, "HeteroFL": 21, "FedSup": 27, "FedHeNN": 16, "FedIN": 11, "SCAFFOLD": 1, "FedDyn": 1,
        "FedProto": 2, "FML": 1, "FedGH": 1, "FedTGP": 2, "DepthFL": 12, "ScaleFL": 3, "FIARSE": 4, "InclusiveFL": 2,
    }  # fmt: skip


@pytest.mark.parametrize("claim", CLAIMS.claims, ids=lambda claim: claim.name)
def test_claim_sides_are_in_its_recipe(claim: Claim) -> None:
    loaded = load(RECIPES / claim.recipe, Registries())
    recipe = loaded.recipe
    assert claim.arms <= {recipe.method.name, *recipe.compare.arms}
    assert {claim.this.tier, claim.other.tier} <= {"*", *(tier.name for tier in recipe.tiers)}
    assert claim.test in recipe.evaluation.tests
    tuned = claim.metric in ("initial", "personalized")
    assert tuned == (claim.metric != "accuracy")
    assert not tuned or recipe.evaluation.fine_tune
    assert recipe.rounds % recipe.evaluation.every == 0
    assert recipe.evaluation.every < recipe.rounds or claim.measure in ("last", "seconds")
    evaluated = {at for at in range(1, recipe.rounds + 1) if at % recipe.evaluation.every == 0}
    evaluated |= set(range(math.floor(recipe.rounds * (1 - recipe.evaluation.dense_last)) + 1, recipe.rounds + 1))
    assert sum(at >= 0.8 * recipe.rounds for at in evaluated) >= 3  # enough for the flatness of the last fifth


def test_ledger_has_only_listed_claims_and_existing_recipes() -> None:
    ledger = read_ledger(RECIPES.parent / "docs" / "results.json")
    assert {entry["claim"] for entry in ledger["claims"]} <= CLAIMS.by_name.keys()
    recipes = {entry["recipe"] for entry in ledger["claims"]} | ledger["comparisons"].keys()
    assert all((RECIPES / recipe).is_file() for recipe in recipes)


def test_claim_list_uses_every_reduced_recipe() -> None:
    reduced = {path.relative_to(RECIPES).as_posix() for path in (RECIPES / "reduced").glob("*.toml")}
    assert {claim.recipe for claim in CLAIMS.claims} == reduced


JUDGED = [{"global": 50, "local": 70}, {"global": 60, "local": 65}, {"global": 55, "local": 80}]
ROUNDS = [
    Row(number, "server", tier, "", test, "accuracy", value)
    for number, by_test in enumerate(JUDGED, 1)
    for test, value in by_test.items()
    for tier in ("a", "b")
] + [
    Row(number, "", "", "", "", metric, value)
    for number in (1, 2, 3)
    for metric, value in (("bytes_down", 3.0 + 2 * number), ("simulated_seconds", 10.0))
]  # fmt: skip


@pytest.mark.parametrize(
    ("number", "value"),
    [
        (PublishedNumber(), 55),
        (PublishedNumber(selection="best"), 60),
        (PublishedNumber(test="local", selection="best"), 80),
        (PublishedNumber(test="local", selection="at best global"), 65),
        (PublishedNumber(selection="mean of last 10"), 55),
        (PublishedNumber(selection="rounds to", target=60), 2),
        (PublishedNumber(selection="rounds to", target=61), None),
        (PublishedNumber(selection="bytes to", target=60), 12),
        (PublishedNumber(selection="bytes to", target=61), None),
        (PublishedNumber(selection="within seconds", target=20), 60),
        (PublishedNumber(selection="within seconds", target=99), 55),
        (PublishedNumber(selection="within seconds", target=9), None),
        (PublishedNumber(candidate="unknown"), None),
        (PublishedNumber(tier="*"), 55),
    ],
)
def test_measure_number_selects_round(number: PublishedNumber, value: float | None) -> None:
    assert measure_number(number, ROUNDS, {"a": 0.5, "b": 0.5}) == value


def test_measure_number_best_of_each_device_is_mean_of_their_bests() -> None:
    by_device = {"0": (90, 70, 80), "1": (10, 30, 20)}
    rows = [
        Row(number, candidate, "a", device, "local", "accuracy", value + 5 * (candidate == "server"))
        for candidate in ("personal", "server")
        for device, values in by_device.items()
        for number, value in enumerate(values, 1)
    ]
    shown = [Row(3, "personal", "a", "", "local", "accuracy", 50.0), *rows]
    number = PublishedNumber(candidate="personal", test="local", selection="best of each device")
    assert measure_number(number, shown, {"a": 1.0}) == 60
    assert measure_number(number, shown[:1], {"a": 1.0}) is None


def test_measure_number_best_perplexity_is_lowest() -> None:
    rows = [
        Row(number, "server", "a", "", "global", "perplexity", value)
        for number, value in ((1, 9.0), (2, 3.0), (3, 4.0))
    ]
    assert measure_number(PublishedNumber(metric="perplexity", selection="best"), rows, {"a": 1.0}) == 3.0


TABLE = """[[tables]]
name = "p"
source = "Table 1"
recipe = "r.toml"
numbers = [{}]
"""
PAPER = f"""paper = "P"
levels = {{ a = 1.0, e = 0.0625 }}
{TABLE}"""


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ('rows = { "a" = [1, 2] }', "has 2 numbers"),
        ('rows = { "a" = [1] }\naxes = [["a"]]', "rows or axes"),
        ('rows = { "a-z" = [1] }', "the word 'a-z' in p is not defined"),
        ('rows = { "a" = [1] }\n' + TABLE + 'rows = { "a" = [1] }', "two rows"),
        ("row = {}", "Extra inputs"),
        ("rows = ", "Invalid value"),
    ],
)  # fmt: skip
def test_read_published_with_mistake_is_refused(rows: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "p.toml").write_text(PAPER + rows)
    with pytest.raises(RecipeError, match=re.escape(problem)):
        read_published(tmp_path)


def test_read_published_starts_are_runs_of_the_other_words(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "p.toml").write_text(
        PAPER
        + 'choices = { late = ["rounds=9"] }\nstarts = { late = ["rounds=4"] }\n'
        + 'rows = { "a" = [1], "a late" = [2] }'
    )
    plain, late = read_published(tmp_path).values()
    assert plain.start is None and late.start is not None
    assert late.changes == (*plain.changes, "rounds=9")
    assert (late.start.name, late.start.changes) == ("p_a_late_start", (*plain.changes, "rounds=4"))


def test_heterofl_quoted_baselines_are_as_in_their_code() -> None:
    """LG-FedAvg's code: rates, rounds, the starting model, Global as the mean of all devices' weights."""
    for name, rounds, start in (("iid_lgfedavg", 200, 400), ("noniid_two-labels_lgfedavg", 500, 400)):
        row = ROWS[f"heterofl_table1_{name}"]
        recipe, before = (load(one.recipe, Registries(), one.changes).recipe for one in (row, row.start or row))
        assert (recipe.rounds, recipe.training.optimizer["lr"]) == (rounds, 0.05)
        assert recipe.document()["model"]["softmax"]
        assert (before.rounds, before.method.name, before.training.optimizer["lr"]) == (start, "fedavg", 0.1)
    for name in ("table1_iid", "table1_noniid_two-labels", "table2_iid", "table2_noniid_two-labels"):
        for method in ("standalone", "lgfedavg"):
            assert ROWS[f"heterofl_{name}_{method}"].numbers[-1][0].candidate == "report_paper"


def test_heterofl_wikitext2_is_trained_and_evaluated_as_in_its_code() -> None:
    """Perplexity is of batches of one window of every test row; windows in order; encoder layers that start alike."""
    recipe = load(RECIPES / "papers" / "heterofl_wikitext2.toml", Registries()).recipe.document()
    data, training = recipe["data"], recipe["training"]
    assert (data["test_order"], data["test_rows"], recipe["evaluation"]["batch_size"]) == ("columns", 10, 10)
    assert (training["shuffle"], training["batch_size"]) == (False, 1)
    assert recipe["model"]["identical_layers"]


def test_published_best_rounds_are_among_all_of_the_last_fifth() -> None:
    """The papers' codes evaluate every round."""
    best = [row for row in ROWS.values() if any(number.selection.startswith("best") for number, _ in row.numbers)]
    settings = {(row.recipe, tuple(one for one in row.changes if one.startswith("evaluation."))) for row in best}
    assert len(best) > 300 and len(settings) > 8
    for path, changes in settings:
        evaluation = load(path, Registries(), changes).recipe.evaluation
        assert evaluation.every == 1 or evaluation.dense_last >= 0.2, (path, changes)


def test_read_published_levels_become_tiers(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "p.toml").write_text(PAPER + 'rows = { "a3-e1" = [1] }')
    (row,) = read_published(tmp_path).values()
    assert row.changes[1:] == (
        "tiers=[{name='a', share=0.75, width=1.0}, {name='e', share=0.25, width=0.0625}]",
    )  # fmt: skip
