"""Invalid arguments: exit 4, the option is named, and nothing is written."""

import pytest


@pytest.mark.parametrize(
    ("arguments", "words", "hint"),
    [
        (["bogus"], "bogus", "fedloom --help"),
        (["run", "--bogus"], "--bogus", "fedloom run --help"),
        (["run", "my.toml", "more.toml"], "more.toml", "fedloom run --help"),
        (["run", "my.toml", "--seed", "one"], "--seed", "fedloom run --help"),
        (["run", "my.toml", "--format", "yaml"], "--format", "fedloom run --help"),
        (["run", "my.toml", "--set"], "--set", "fedloom run --help"),
        (["plan"], "RECIPE", "fedloom plan --help"),
        (["check"], "RECIPES", "fedloom check --help"),
        (["init"], "METHOD", "fedloom init --help"),
        (["list"], "KIND", "fedloom list --help"),
        (["list", "bogus"], "bogus", "fedloom list --help"),
        (["compare", "my.toml", "--seeds", "0"], "--seeds", "fedloom compare --help"),
    ],
    ids=" ".join,
)
def test_usage_error_text_is_exit_4(arguments, words, hint, fedloom, write, files):
    write()
    before = files()

    result = fedloom(*arguments)
    assert (result.code, result.out) == (4, "")
    assert result.err.startswith("error ARGUMENTS: ")
    assert words.lower() in result.err.lower()
    assert result.err.endswith(f"  hint: {hint}\n")
    assert files() == before


@pytest.mark.parametrize("spelling", [["--format", "json"], ["--format=json"]], ids=["two words", "one word"])
@pytest.mark.parametrize("arguments", [["bogus"], ["run", "--bogus"]], ids=" ".join)
def test_usage_error_json_is_one_object(arguments, spelling, fedloom):
    result = fedloom(*arguments, *spelling)
    assert (result.code, result.err) == (4, "")
    assert result.failure["error_code"] == "ARGUMENTS"
    assert "bogus" in result.failure["message"]
    assert result.failure["hint"].endswith("--help")


@pytest.mark.parametrize("change", ["rounds", "=3", "training..epochs=3", ".rounds=3", "rounds.=3", ""])
def test_set_malformed_change_is_refused(change, fedloom, write, files):
    write()
    before = files()
    result = fedloom("run", "my.toml", "--set", change)
    (issue,) = result.issues
    assert (result.code, issue.where, issue.code) == (4, "--set", "SET_FORM")
    assert repr(change) in issue.message
    assert "--set training.epochs=2" in issue.hint
    assert files() == before


@pytest.mark.parametrize(
    "place", ["rounds.first", "tiers.7.width", "tiers.first.width", "tiers[2].width", "data.dataset.name", "tiers.2"]
)
def test_set_unknown_key_is_refused(place, fedloom, write, files):
    write()
    before = files()
    result = fedloom("run", "my.toml", "--set", f"{place}=1")
    (issue,) = result.issues
    assert (result.code, issue.where, issue.code) == (4, "--set", "SET_PLACE")
    assert place in issue.message
    assert files() == before


@pytest.mark.parametrize(
    ("change", "what", "code", "hint"),
    [
        ("round=3", "round = 3", "RECIPE_KEY", "rounds"),
        ("rounds=0", "rounds = 0", "RECIPE_RANGE", ""),
        ("rounds=two", "rounds = 'two'", "RECIPE_TYPE", ""),
        ("rounds=", "rounds = ''", "RECIPE_TYPE", ""),
        ("data.dataset=digit", "data.dataset = 'digit'", "RECIPE_NAME", "digits"),
        ("data.devces=3", "data.devces = 3", "RECIPE_KEY", "devices"),
        ("tiers.1.width=1.5", "tiers[1].width = 1.5", "RECIPE_RANGE", ""),
        ("tiers[1].width=1.5", "tiers[1].width = 1.5", "RECIPE_RANGE", ""),
        ("tiers.-1.width=1.5", "tiers[1].width = 1.5", "RECIPE_RANGE", ""),
        ("tiers.1.name=large", "tiers[1].name = 'large'", "RECIPE_VALUE", ""),
        ("tiers=3", "tiers = 3", "RECIPE_TYPE", ""),
        ("data=3", "data = 3", "RECIPE_TYPE", ""),
        ("method.name=fedavg", "method.name = 'fedavg'", "METHOD_REFUSES", ""),
        ("data.partition={kind='idd'}", "data.partition.kind = 'idd'", "RECIPE_NAME", "iid"),
        ("training.optimizer={kind='sgd',rate=1}", "training.optimizer.rate = 1", "RECIPE_KEY", "lr"),
    ],
)
def test_set_bad_value_names_the_command_line(change, what, code, hint, fedloom, write, files):
    write()
    before = files()
    result = fedloom("run", "my.toml", "--set", change)
    (issue,) = result.issues
    assert (result.code, issue.where, issue.what, issue.code) == (4, "--set", what, code)
    assert hint in issue.hint
    assert files() == before


@pytest.mark.parametrize("place", ["3", "data.3", "training.0", "method.1", "data.²", "rounds²"])
def test_set_number_as_key_is_refused(place, fedloom, write, files):
    write()
    before = files()
    result = fedloom("run", "my.toml", "--set", f"{place}=1")
    assert result.code == 4
    assert [one.where for one in result.issues] == ["--set"]
    assert files() == before


def test_set_and_file_issues_name_their_source(fedloom, write, line_of):
    path = write(("devices = 4", "devices = 0"))
    result = fedloom("run", "my.toml", "--set", "rounds=0")
    assert result.code == 4
    assert {(one.where, one.what) for one in result.issues} == {
        ("--set", "rounds = 0"),
        (f"my.toml:{line_of(path, 'devices')}", "data.devices = 0"),
    }


def test_seed_negative_is_refused(fedloom, write, files):
    write()
    before = files()
    result = fedloom("run", "my.toml", "--seed", "-1")
    (issue,) = result.issues
    assert (result.code, issue.what, issue.code) == (4, "seed = -1", "RECIPE_RANGE")
    assert files() == before


@pytest.mark.parametrize("verb", ["run", "compare"])
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_out_existing_path_is_refused(verb, kind, fedloom, write, files, tmp_path):
    write()
    taken = tmp_path / "taken"
    taken.mkdir() if kind == "folder" else taken.write_text("mine")
    before = files()
    result = fedloom(verb, "my.toml", "--out", "taken")
    (issue,) = result.issues
    assert (result.code, result.out, issue.where, issue.code) == (4, "", "--out", "OUT_EXISTS")
    assert "another --out" in issue.hint
    assert files() == before
    as_json = fedloom(verb, "my.toml", "--out", "taken", "--format", "json")
    assert (as_json.code, as_json.failure["error_code"]) == (4, "OUT_EXISTS")


def test_out_below_a_file_is_refused_by_every_verb(fedloom, write, files, tmp_path):
    write(("rounds = 2", "rounds = 1"))
    (tmp_path / "afile").write_text("mine")
    assert fedloom("run", "my.toml", "--out", "run", "--quiet").code == 0
    before = files()
    verbs = (["run", "my.toml"], ["compare", "my.toml"], ["export", "run", "--to", "safetensors"], ["report", "run"])
    for arguments in verbs:
        result = fedloom(*arguments, "--out", "afile/x")
        (issue,) = result.issues
        assert (result.code, issue.where, issue.code) == (4, "--out", "OUT_PLACE"), arguments
        assert issue.message == "afile is a file, so it cannot hold afile/x"
    for arguments in (["init", "heterofl"], ["subnet", "run", "--quiet"]):
        assert fedloom(*arguments, "--out", "afile/x").code == 4, arguments
    assert files() == before


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (None, "FILE_MISSING", "my.py"),
        ("", "WITH_EMPTY", "my.py"),
        ("METHODS = {}\n", "WITH_EMPTY", "my.py"),
        ("methods = {'mine': 1}\n", "WITH_EMPTY", "my.py"),
        ("raise ValueError('not today')\n", "WITH_FAILED", "importing it raised ValueError: not today"),
        ("import no_such_module\n", "WITH_FAILED", "no_such_module"),
        ("def (\n", "WITH_FAILED", "SyntaxError"),
    ],
    ids=["missing", "empty", "no names", "lower case", "raises", "import", "no Python"],
)
def test_with_unusable_file_is_refused(content, code, words, fedloom, write, files, tmp_path):
    write()
    if content is not None:
        (tmp_path / "my.py").write_text(content)
    before = files()
    result = fedloom("run", "my.toml", "--with", "my.py")
    (issue,) = result.issues
    assert (result.code, result.out, issue.where, issue.code) == (4, "", "my.py", code)
    assert words in issue.message
    assert ("METHODS, MODELS, METRICS" in issue.hint) == (code == "WITH_EMPTY")
    assert files() == before


@pytest.mark.parametrize(
    ("name", "content"),
    [("my.py", "METHODS = ['mine']\n"), ("my.py", "METHODS = {'mine': 3}\n"), ("my.txt", "METHODS = {}\n")],
    ids=["a list", "no class", "no .py"],
)
def test_with_wrong_kind_of_object_is_user_error(name, content, fedloom, write, files, tmp_path):
    write()
    (tmp_path / name).write_text(content)
    before = files()
    result = fedloom("run", "my.toml", "--with", name, "--set", "method.name=mine")
    assert result.code == 4
    assert name in result.err
    assert files() == before


@pytest.mark.parametrize("verb", ["run", "plan", "check", "compare", "doctor"])
def test_with_missing_file_is_refused_by_every_verb(verb, fedloom, write, files):
    write()
    before = files()
    result = fedloom(verb, "my.toml", "--with", "my.py")
    assert result.code == 4
    assert [one.code for one in result.issues] == ["FILE_MISSING"]
    assert files() == before


@pytest.mark.parametrize(
    ("arguments", "code", "hint"),
    [
        (["--controls", "small-for-al"], "CONTROL_NAME", "small-for-all"),
        (["--test", "glbal"], "TEST_NAME", ""),
        (["--test", "local", "--set", "evaluation.tests=['global']"], "TEST_NAME", ""),
    ],
    ids=["control", "test", "test that is not evaluated"],
)
def test_compare_bad_arguments_are_refused(arguments, code, hint, fedloom, write, files):
    write()
    before = files()
    result = fedloom("compare", "my.toml", *arguments)
    (issue,) = result.issues
    assert (result.code, issue.code) == (4, code)
    assert hint in issue.hint
    assert files() == before
