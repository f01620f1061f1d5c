"""Invalid recipes: exit 4, the code, the key with its line, a hint, and nothing is written."""

from typing import NamedTuple

import pytest


class Case(NamedTuple):
    old: str  # text of the small recipe ...
    new: str  # ... and its replacement
    code: str
    line: str  # prefix of the line that is named
    what: str  # the key, and its value if there is one
    hint: str = ""


LAST_TIER = 'name = "small"\nshare = 0.5\nwidth = 0.5'

WRONG_KEYS = {
    "top level": Case("rounds = 2", "rounds = 2\nround = 3", "RECIPE_KEY", "round = 3", "round = 3", "rounds"),
    "section": Case(
        "batch_size = 100", "batchsize = 9", "RECIPE_KEY", "batchsize", "training.batchsize = 9", "batch_size"
    ),
    "data": Case("devices = 4", "devces = 4", "RECIPE_KEY", "devces", "data.devces = 4", "devices"),
    "data without a data set": Case(
        'dataset = "digits"\ndevices = 4', "devces = 4", "RECIPE_KEY", "devces", "data.devces = 4", "devices"
    ),
    "option of a reader": Case(
        'dataset = "digits"', 'dataset = "cifar100"\nlabel = "coarse"', "RECIPE_KEY", "label", "data.label = 'coarse'",
        "labels",
    ),
    "model": Case('family = "convnet"', "famly = 'x'", "RECIPE_KEY", "famly", "model.famly = 'x'", "family"),
    "model setting": Case("hidden = [2, 4]", "hiden = [2, 4]", "RECIPE_KEY", "hiden", "model.hiden", "hidden"),
    "what the project hands over": Case(
        "hidden = [2, 4]", "hidden = [2, 4]\nwidest = 1.0", "RECIPE_KEY", "widest", "model.widest = 1.0"
    ),
    "tier setting": Case("width = 0.5", "widht = 0.5", "RECIPE_KEY", "widht", "tiers[1].widht = 0.5", "width"),
    "tier": Case(
        LAST_TIER, LAST_TIER + "\nshares = 0.5", "RECIPE_KEY", "shares", "tiers[1].shares = 0.5", "share"
    ),
    "method setting": Case(
        'name = "heterofl"', 'name = "heterofl"\nunsen_logit = 0.0', "RECIPE_KEY", "unsen_logit",
        "method.unsen_logit = 0.0", "unseen_logit",
    ),
    "partition option": Case(
        "devices = 4", 'devices = 4\npartition = { kind = "quantity", alpha = 1.0, minimum_examples = 3 }',
        "RECIPE_KEY", "partition", "data.partition.minimum_examples = 3", "min_examples",
    ),
    "optimizer option": Case(
        "batch_size = 100", 'optimizer = { kind = "sgd", learning_rat = 0.1 }', "RECIPE_KEY", "optimizer",
        "training.optimizer.learning_rat = 0.1", "lr",
    ),
    "lr_schedule option": Case(
        "batch_size = 100", 'lr_schedule = { kind = "milestones", round = [1] }', "RECIPE_KEY", "lr_schedule",
        "training.lr_schedule.round", "rounds",
    ),
    "statistics option": Case(
        "[method]", "[evaluation]\nstatistics = { qery = 'pooled' }\n\n[method]", "RECIPE_KEY", "statistics",
        "evaluation.statistics.qery = 'pooled'", "query",
    ),
    "start": Case("[method]", "[start]\nfrm = 'x'\n\n[method]", "RECIPE_KEY", "frm", "start.frm = 'x'", "from"),
}  # fmt: skip

UNKNOWN_NAMES = {
    "method": Case('"heterofl"', '"hetrofl"', "RECIPE_NAME", 'name = "hetrofl"', "method.name = 'hetrofl'", "heterofl"),
    "model": Case('"convnet"', '"convnt"', "RECIPE_NAME", "family", "model.family = 'convnt'", "convnet"),
    "dataset": Case('"digits"', '"digit"', "RECIPE_NAME", "dataset", "data.dataset = 'digit'", "digits"),
    "partition": Case(
        "devices = 4", "devices = 4\npartition = { kind = 'idd' }", "RECIPE_NAME", "partition",
        "data.partition.kind = 'idd'", "iid",
    ),
    "preparation": Case(
        "devices = 4", "devices = 4\npreparation = 'plane'", "RECIPE_NAME", "preparation",
        "data.preparation = 'plane'", "plain",
    ),
    "optimizer": Case(
        "batch_size = 100", "optimizer = { kind = 'sdg' }", "RECIPE_NAME", "optimizer",
        "training.optimizer.kind = 'sdg'", "sgd",
    ),
    "lr_schedule": Case(
        "batch_size = 100", "lr_schedule = { kind = 'milestone' }", "RECIPE_NAME", "lr_schedule",
        "training.lr_schedule.kind = 'milestone'", "milestones",
    ),
    "eligible tier": Case(
        "[method]", "[fleet]\neligible = ['smal']\n\n[method]", "RECIPE_NAME", "eligible",
        "fleet.eligible = 'smal'", "small",
    ),
    "engine": Case(
        "[method]", "[engine]\nkind = 'in_proces'\n\n[method]", "RECIPE_NAME", "kind", "engine.kind = 'in_proces'",
        "in_process",
    ),
}  # fmt: skip

WRONG_VALUES = {
    "choice": Case(
        "batch_size = 100", "last_batch = 'dropp'", "RECIPE_VALUE", "last_batch", "training.last_batch = 'dropp'",
        "drop",
    ),
    "choice of a method": Case(
        'name = "heterofl"', 'name = "heterofl"\nweighting = "example"', "RECIPE_VALUE", "weighting",
        "method.weighting = 'example'", "examples",
    ),
    "choice of a model": Case(
        "hidden = [2, 4]", "hidden = [2, 4]\nnormalization = 'batch'", "RECIPE_VALUE", "normalization",
        "model.normalization = 'batch'", "static_batch",
    ),
    "text for a number": Case("rounds = 2", 'rounds = "two"', "RECIPE_TYPE", "rounds", "rounds = 'two'"),
    "fraction for a count": Case("rounds = 2", "rounds = 2.5", "RECIPE_TYPE", "rounds", "rounds = 2.5"),
    "truth for a count": Case("devices = 4", "devices = true", "RECIPE_TYPE", "devices", "data.devices = True"),
    "number for a text": Case('dataset = "digits"', "dataset = 3", "RECIPE_TYPE", "dataset", "data.dataset = 3"),
    "list for a text": Case('dataset = "digits"', "dataset = ['digits']", "RECIPE_TYPE", "dataset", "data.dataset"),
    "list for a family": Case('family = "convnet"', "family = ['convnet']", "RECIPE_TYPE", "family", "model.family"),
    "list for a method": Case('name = "heterofl"', "name = ['heterofl']", "RECIPE_TYPE", "name = [", "method.name"),
    "list for a preparation": Case(
        "devices = 4", "devices = 4\npreparation = ['plain']", "RECIPE_TYPE", "preparation", "data.preparation"
    ),
    "number for a list": Case(
        "[method]", "[fleet]\neligible = 3\n\n[method]", "RECIPE_TYPE", "eligible", "fleet.eligible = 3"
    ),
    "text for a table": Case(
        "devices = 4", "devices = 4\npartition = 'iid'", "RECIPE_TYPE", "partition", "data.partition = 'iid'"
    ),
    "text for a setting": Case(
        'name = "heterofl"', 'name = "heterofl"\nmask_unseen_labels = "yes"', "RECIPE_TYPE", "mask_unseen_labels",
        "method.mask_unseen_labels = 'yes'",
    ),
    "no rounds": Case("rounds = 2", "rounds = 0", "RECIPE_RANGE", "rounds", "rounds = 0"),
    "negative seed": Case("seed = 0", "seed = -1", "RECIPE_RANGE", "seed", "seed = -1"),
    "width above 1": Case("width = 0.5", "width = 1.5", "RECIPE_RANGE", "width = 1.5", "tiers[1].width = 1.5"),
    "participation 0": Case(
        "[method]", "[fleet]\nparticipation = 0.0\n\n[method]", "RECIPE_RANGE", "participation",
        "fleet.participation = 0.0",
    ),
    "negative learning rate": Case(
        "batch_size = 100", "optimizer = { kind = 'sgd', lr = -0.1 }", "RECIPE_RANGE", "optimizer",
        "training.optimizer.lr = -0.1",
    ),
    "no channels": Case("hidden = [2, 4]", "hidden = [2, 0]", "RECIPE_RANGE", "hidden", "model.hidden[1] = 0"),
}  # fmt: skip

MISSING = {
    "rounds": Case("rounds = 2\n", "", "RECIPE_MISSING", "", "rounds"),
    "method": Case('[method]\nname = "heterofl"\n', "", "RECIPE_MISSING", "", "method"),
    "method's name": Case('name = "heterofl"\n', "", "RECIPE_MISSING", "[method]", "method.name"),
    "share": Case("share = 0.5\nwidth = 0.5\n", "width = 0.5\n", "RECIPE_MISSING", "LAST TIER", "tiers[1].share"),
    "kind": Case(
        "batch_size = 100", "optimizer = { lr = 0.1 }", "RECIPE_MISSING", "optimizer",
        "training.optimizer.kind", "sgd",
    ),
    "option of a partition": Case(
        "devices = 4", "devices = 4\npartition = { kind = 'quantity' }", "RECIPE_MISSING", "partition",
        "data.partition.alpha",
    ),
    "option of a reader": Case('"digits"', '"npz"', "RECIPE_MISSING", "[data]", "data.file"),
}  # fmt: skip

DOES_NOT_FIT = {
    "shares": Case(
        "share = 0.5\nwidth = 0.5", "share = 0.4\nwidth = 0.5", "RECIPE_SHARES", "FIRST TIER", "tiers", "0.9"
    ),
    "two tiers of one name": Case(
        'name = "small"', 'name = "large" # again', "RECIPE_VALUE", 'name = "large" # again', "tiers[1].name = 'large'"
    ),
    "more labels than classes": Case(
        "devices = 4", "devices = 4\npartition = { kind = 'label_shards', labels_per_device = 11 }", "RECIPE_VALUE",
        "partition", "data.partition",
    ),
    "labels that do not go round": Case(
        "devices = 4", "devices = 4\npartition = { kind = 'label_shards', labels_per_device = 3 }", "RECIPE_VALUE",
        "partition", "data.partition",
    ),
    "more devices than examples": Case(
        "devices = 4", "devices = 2000", "RECIPE_VALUE", "devices", "data.devices = 2000"
    ),
    "one model for all, but tiers": Case(
        '"heterofl"', '"fedavg"', "METHOD_REFUSES", 'name = "fedavg"', "method.name = 'fedavg'"
    ),
    "fedhen without exits": Case(
        '"heterofl"', '"fedhen"', "METHOD_REFUSES", 'name = "fedhen"', "method.name = 'fedhen'"
    ),
    "noside without exits": Case(
        '"heterofl"', '"noside"', "METHOD_REFUSES", 'name = "noside"', "method.name = 'noside'"
    ),
    "standalone with redrawn tiers": Case(
        '[method]\nname = "heterofl"', "[method]\nname = 'standalone'\n[fleet]\nassignment = 'redrawn'",
        "METHOD_REFUSES", "name = 'standalone'", "method.name = 'standalone'",
    ),
    "a tier that does not lie in the largest": Case(
        "width = 0.5", "width = 0.5\nhidden = [8, 1]", "TIER_SHAPE", "FIRST TIER", "tiers"
    ),
    "a model too deep for the images": Case(
        "hidden = [2, 4]", "hidden = [2, 2, 2, 2, 2]", "MODEL_BUILD", "FIRST TIER", "tiers[0]"
    ),
    "a model that cannot be built": Case(
        'family = "convnet"', 'family = "preresnet"\nblocks = [1]', "MODEL_BUILD", "FIRST TIER", "tiers[0]"
    ),
}  # fmt: skip

CASES = {
    f"{group}: {name}": case
    for group, cases in {
        "wrong key": WRONG_KEYS,
        "unknown name": UNKNOWN_NAMES,
        "wrong value": WRONG_VALUES,
        "missing": MISSING,
        "does not fit": DOES_NOT_FIT,
    }.items()
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", CASES)
def test_run_bad_recipe_is_refused_before_anything_is_written(name, fedloom, write, files):
    case = CASES[name]
    path = write((case.old, case.new))
    before = files()

    result = fedloom("run", "my.toml")

    assert (result.code, result.out) == (4, "")
    assert files() == before
    (issue,) = [one for one in result.issues if one.what == case.what]
    assert issue.where == where(case, path)
    assert issue.code == case.code
    assert case.hint in issue.hint

    as_json = fedloom("run", "my.toml", "--format", "json")
    assert (as_json.code, as_json.err) == (4, "")
    assert files() == before
    assert as_json.failure["message"] == result.err.rstrip("\n")
    assert as_json.failure["error_code"] == result.issues[0].code
    assert as_json.failure["hint"] == result.issues[0].hint


@pytest.mark.parametrize("name", ["", "sm/all", "../small"])
def test_run_tier_name_unusable_as_file_name_is_refused(name, fedloom, write, files, line_of):
    path = write(('name = "small"', f"name = '{name}'"))
    before = files()
    result = fedloom("run", "my.toml")
    number = line_of(path, f"name = '{name}'")
    assert (result.code, result.out) == (4, "")
    assert [(one.where, one.what) for one in result.issues] == [(f"my.toml:{number}", f"tiers[1].name = {name!r}")]
    assert files() == before


@pytest.mark.parametrize("verb", ["plan", "check", "compare", "doctor"])
@pytest.mark.parametrize(
    "name",
    [
        "wrong key: tier setting",
        "does not fit: one model for all, but tiers",
        "does not fit: fedhen without exits",
        "does not fit: a model too deep for the images",
    ],
)
def test_every_verb_bad_recipe_is_refused_alike(verb, name, fedloom, write, files):
    case = CASES[name]
    path = write((case.old, case.new))
    before = files()

    result = fedloom(verb, "my.toml")

    assert (result.code, result.out) == (4, "")
    assert [(one.where, one.code) for one in result.issues] == [(where(case, path), case.code)]
    assert files() == before


def test_run_several_issues_are_reported_at_once(fedloom, write, line_of):
    path = write(
        ("rounds = 2", "rounds = 0"),
        ("devices = 4", "devices = 'four'\npartition = { kind = 'idd' }"),
        ("hidden = [2, 4]", "hidden = [2, 4]\nnormalization = 'batch'"),
        ("share = 0.5\nwidth = 0.5", "share = 0.4\nwidht = 0.5"),
        ("batch_size = 100", "batchsize = 100\noptimizer = { kind = 'sgd', momentum = 2.0 }"),
        ('name = "heterofl"', "name = 'hetrofl'"),
    )

    result = fedloom("run", "my.toml")

    expected = {
        (line_of(path, "rounds"), "rounds = 0", "RECIPE_RANGE"),
        (line_of(path, "devices"), "data.devices = 'four'", "RECIPE_TYPE"),
        (line_of(path, "partition"), "data.partition.kind = 'idd'", "RECIPE_NAME"),
        (line_of(path, "normalization"), "model.normalization = 'batch'", "RECIPE_VALUE"),
        (first_tier(path), "tiers", "RECIPE_SHARES"),
        (line_of(path, "widht"), "tiers[1].widht = 0.5", "RECIPE_KEY"),
        (line_of(path, "batchsize"), "training.batchsize = 100", "RECIPE_KEY"),
        (line_of(path, "optimizer"), "training.optimizer.momentum = 2.0", "RECIPE_RANGE"),
        (line_of(path, "name = 'hetrofl'"), "method.name = 'hetrofl'", "RECIPE_NAME"),
    }
    assert result.code == 4
    assert len(result.issues) == len(expected)
    assert {(one.where, one.what, one.code) for one in result.issues} == {
        (f"my.toml:{number}", what, code) for number, what, code in expected
    }


def test_run_key_missing_twice_is_reported_twice(fedloom, write):
    write(('name = "large"\n', ""), ('name = "small"\n', ""))
    result = fedloom("run", "my.toml")
    assert result.code == 4
    assert [(one.what, one.code) for one in result.issues] == [
        ("tiers[0].name", "RECIPE_MISSING"),
        ("tiers[1].name", "RECIPE_MISSING"),
    ]


def test_run_unknown_eligible_tiers_are_all_reported(fedloom, write):
    write(("[method]", "[fleet]\neligible = ['huge', 'tiny']\n\n[method]"))
    result = fedloom("run", "my.toml")
    assert result.code == 4
    assert "huge" in result.err
    assert "tiny" in result.err


def test_run_several_issues_json_has_the_first_code(fedloom, write):
    write(("rounds = 2", "rounds = 2\nround = 3"), ('name = "heterofl"', "name = 'hetrofl'"))
    failure = fedloom("run", "my.toml", "--format", "json").failure
    assert failure["error_code"] == "RECIPE_KEY"
    assert failure["hint"] == "did you mean 'rounds'?"
    assert "error RECIPE_KEY: " in failure["message"]
    assert "error RECIPE_NAME: " in failure["message"]


def test_run_broken_toml_names_the_line(fedloom, write, files):
    write(("devices = 4", "devices = = 4"))
    before = files()
    result = fedloom("run", "my.toml")
    (issue,) = result.issues
    assert (result.code, issue.where, issue.code) == (4, "my.toml", "RECIPE_TOML")
    assert "line 7" in issue.message
    assert files() == before


def test_run_recipe_in_another_encoding_is_refused(fedloom, write, files):
    path = write()
    path.write_bytes(path.read_text().replace("bundled", "caf\xe9").encode("latin-1"))
    before = files()
    result = fedloom("run", "my.toml")
    assert result.code == 4
    assert [one.where.partition(":")[0] for one in result.issues] == ["my.toml"]
    assert files() == before


def test_run_missing_recipe_hint_lists_recipes(fedloom, write, files):
    write(to="other.toml")
    before = files()
    result = fedloom("run", "my.toml")
    (issue,) = result.issues
    assert (result.code, issue.where, issue.code) == (4, "my.toml", "FILE_MISSING")
    assert issue.hint == "there are: other.toml"
    assert files() == before


def test_run_missing_recipe_in_empty_folder_hint_is_init(fedloom, files):
    result = fedloom("run", "my.toml", "--format", "json")
    assert result.code == 4
    assert result.failure["error_code"] == "FILE_MISSING"
    assert "fedloom init" in result.failure["hint"]
    assert files() == {}


@pytest.mark.parametrize(
    ("change", "file"),
    [
        (('"digits"', '"npz"\nfile = "mine.npz"'), "mine.npz"),
        (('"digits"', '"cifar10"'), "data_batch_1.bin"),
    ],
    ids=["npz", "cifar10"],
)
def test_run_missing_data_hint_names_the_file(change, file, fedloom, write, files):
    write(change)
    before = files()
    result = fedloom("run", "my.toml", "--format", "json")
    assert result.code == 4
    assert result.failure["error_code"] == "DATA_MISSING"
    assert file in result.failure["message"] + result.failure["hint"]
    assert result.failure["hint"]
    assert files() == before
    assert "error DATA_MISSING: " in fedloom("run", "my.toml").err


def test_run_broken_data_is_reported(fedloom, write, files, tmp_path):
    (tmp_path / "mine.npz").write_text("no arrays")
    write(('"digits"', '"npz"\nfile = "mine.npz"'))
    before = files()
    result = fedloom("run", "my.toml", "--format", "json")
    assert result.code == 4
    assert result.failure["error_code"] == "DATA_BROKEN"
    assert "mine.npz" in result.failure["message"]
    assert files() == before


@pytest.mark.parametrize(
    ("source", "code"),
    [("nothing", "FILE_MISSING"), ("run/models/small.safetensors", "START_SHAPE")],
    ids=["missing", "another shape"],
)
def test_run_unfitting_start_model_is_refused(source, code, fedloom, write, files, line_of):
    write()
    assert fedloom("run", "my.toml", "--set", "rounds=1", "--out", "run").code == 0
    path = write(("[method]", f"[start]\nfrom = '{source}'\n\n[method]"))
    before = files()
    result = fedloom("run", "my.toml", "--out", "next")
    (issue,) = result.issues
    assert (result.code, result.out, issue.code) == (4, "", code)
    assert (issue.where, issue.what) == (f"my.toml:{line_of(path, 'from')}", "start.from")
    assert source in issue.message
    assert files() == before


def where(case, path):
    if case.line == "FIRST TIER":
        return f"my.toml:{first_tier(path)}"
    if case.line == "LAST TIER":
        lines = path.read_text().splitlines()
        return f"my.toml:{len(lines) - lines[::-1].index('[[tiers]]')}"
    if not case.line:
        return "my.toml"
    (number,) = [n for n, line in enumerate(path.read_text().splitlines(), 1) if line.startswith(case.line)]
    return f"my.toml:{number}"


def first_tier(path):
    return path.read_text().splitlines().index("[[tiers]]") + 1
