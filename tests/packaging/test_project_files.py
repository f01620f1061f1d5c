"""Files that tools outside the package read: versions agree, YAML parses, and what it refers to exists."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedloom

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
PAGES = [ROOT / name for name in ("CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md")]


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def make_commands(text: str) -> list[str]:
    """The targets of all `make TARGET` in a text."""
    return re.findall(r"\bmake ([a-z][\w-]*)", text)


def test_version_is_the_same_in_code_citation_and_changelog() -> None:
    source = (ROOT / "src/fedloom/__init__.py").read_text("utf-8")
    assert re.findall(r'^__version__ = "(\d+\.\d+\.\d+)"$', source, re.MULTILINE) == [fedloom.__version__]
    assert read_yaml(ROOT / "CITATION.cff")["version"] == fedloom.__version__
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == fedloom.__version__


def test_pyproject_has_no_version_of_its_own() -> None:
    content = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert "version" not in content["project"]
    assert content["project"]["dynamic"] == ["version"]
    assert content["tool"]["hatch"]["version"]["path"] == "src/fedloom/__init__.py"


def test_pyproject_license_files_exist_and_citation_agrees() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for pattern in project["license-files"]:
        assert list(ROOT.glob(pattern)), pattern
    assert read_yaml(ROOT / "CITATION.cff")["license"] == project["license"]


def test_pyproject_sdist_lists_existing_files() -> None:
    content = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    included = content["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"]
    assert [name for name in included if not (ROOT / name).exists()] == []


def test_workflows_run_existing_make_targets() -> None:
    ran = set[str]()
    for path in WORKFLOWS:
        for job in read_yaml(path)["jobs"].values():
            assert job["timeout-minutes"] > 0
            for step in job["steps"]:
                assert ("uses" in step) != ("run" in step)
                ran.update(make_commands(step.get("run", "")))
    assert {"check", "test", "test-slow", "docs", "dist"} <= ran
    assert ran <= make_targets()


def test_workflow_tests_every_supported_python_on_linux_and_macos() -> None:
    matrix = read_yaml(GITHUB / "workflows" / "ci.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == ["3.11", "3.12", "3.13"]  # strings: 3.10 as a number would be 3.1
    assert {name.partition("-")[0] for name in matrix["os"]} == {"ubuntu", "macos"}
    required = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["requires-python"]
    assert required == f">={matrix['python'][0]}"


def test_workflows_may_only_read_the_repository() -> None:
    for path in WORKFLOWS:
        assert read_yaml(path)["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_form_has_labelled_fields(path: Path) -> None:
    form = read_yaml(path)
    assert form["name"]
    assert form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    identifiers = [field["id"] for field in fields]
    assert len(set(identifiers)) == len(identifiers) > 0
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field.get("validations", {}).get("required") for field in fields)
    assert {field["type"] for field in form["body"]} <= {"markdown", "textarea", "input", "dropdown", "checkboxes"}


def test_issue_forms_are_bug_feature_and_method() -> None:
    assert [path.stem for path in FORMS] == ["bug", "feature", "method"]


def test_dependabot_watches_packages_and_actions() -> None:
    content = read_yaml(GITHUB / "dependabot.yml")
    assert content["version"] == 2
    assert {update["package-ecosystem"] for update in content["updates"]} == {"pip", "github-actions"}
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    ignored = [one["dependency-name"] for update in content["updates"] for one in update.get("ignore", [])]
    assert set(ignored) <= set(pinned)


def test_pre_commit_hooks_are_the_checks_of_make_check() -> None:
    """Without downloads: every hook is a tool of .venv."""
    (repository,) = read_yaml(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    hooks = repository["hooks"]
    assert all(hook["language"] == "system" for hook in hooks)
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert recipe is not None
    checks = {re.sub(r" --check| \.$", "", line) for line in re.findall(r"\t\$\(BIN\)/(.*)", recipe[1])}
    checks = {re.sub(r" \.$", "", line) for line in checks}
    assert {hook["entry"].removeprefix(".venv/bin/").removesuffix(" --force-exclude") for hook in hooks} == checks
    assert all(hook["entry"].startswith(".venv/bin/") for hook in hooks)


def test_pre_commit_accepts_its_configuration() -> None:
    command = [sys.executable, "-m", "pre_commit", "validate-config", str(ROOT / ".pre-commit-config.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_links_lead_to_files_and_sections(page: Path) -> None:
    for target, section in re.findall(r"\]\(([^)#:]+)(?:#([^)]+))?\)", page.read_text("utf-8")):
        path = ROOT / target
        assert path.is_file(), target
        headings = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not section or section in anchors, f"{target}#{section}"


def test_contributing_names_existing_targets_folders_and_files() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert set(make_commands(text)) <= make_targets()
    assert {"setup", "check", "test", "test-slow", "docs", "dist"} <= set(make_commands(text))
    paths = re.findall(r"`((?:src|tests)/[^`]*)`", text)
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_stability_page_exit_codes_are_those_of_the_command_line() -> None:
    from fedloom.cli import output

    text = (ROOT / "docs/stability.md").read_text("utf-8")
    row = re.search(r"^\| exit codes: (.*?) \|", text, re.MULTILINE)
    assert row is not None
    codes = [output.OK, output.RUN_FAILED, output.NO_QUORUM, output.BAD_INPUT, output.OUR_BUG, output.INTERRUPTED]
    assert [int(code) for code in re.findall(r"(?:^|, )(\d+) ", row[1])] == codes
