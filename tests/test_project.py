"""Files around the package: citation, templates, workflow, hooks and archives say what is so."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import depthmix as dm
from depthmix.support.files import parse_toml
from tools import package

ROOT = Path(__file__).parent.parent
PROJECT = parse_toml((ROOT / "pyproject.toml").read_text(), "pyproject.toml", "Restore it")
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOW = ROOT / ".github" / "workflows" / "test.yml"
FORMS = sorted(p for p in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if p.stem != "config")


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def check_authors(authors: Any) -> None:
    assert authors
    for author in authors:  # an entity has a name, a person none
        assert {"name"} <= set(author) or {"family-names", "given-names"} & set(author)


def test_the_citation_has_the_keys_of_cff_1_2_0_and_this_version() -> None:
    citation = load(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] == "software"
    check_authors(citation["authors"])
    assert [a["name"] for a in citation["authors"]] == [a["name"] for a in PROJECT["project"]["authors"]]
    assert citation["version"] == dm.__version__
    assert citation["license"] == PROJECT["project"]["license"]
    assert citation["repository-code"] == PROJECT["project"]["urls"]["Repository"]
    assert citation["keywords"] == PROJECT["project"]["keywords"]


def test_the_citation_names_papers_that_mechanisms_name() -> None:
    papers = [dm.mechanism(name).paper for name in dm.list_mechanisms()]
    papers += [dm.mechanisms.kv_mechanism(name).paper for name in dm.list_mechanisms(kind="kv")]
    references = load(ROOT / "CITATION.cff")["references"]
    assert len(references) > 1
    for reference in references:
        assert {"type", "title", "authors"} <= set(reference)
        check_authors(reference["authors"])
        number = reference["url"].removeprefix("https://arxiv.org/abs/")
        assert f"arXiv {number}" in papers
        assert reference["identifiers"] == [{"type": "other", "value": f"arXiv:{number}"}]


def test_addresses_lie_in_the_repository() -> None:
    urls = PROJECT["project"]["urls"]
    assert set(urls) == {"Repository", "Documentation", "Changelog", "Issues"}
    for name in ("Documentation", "Changelog"):
        path = re.fullmatch(rf"{urls['Repository']}/(?:tree|blob)/main/(.+)", urls[name])
        assert path is not None
        assert (ROOT / path[1]).exists()
    assert urls["Issues"] == urls["Repository"] + "/issues"


def test_the_workflow_calls_targets_of_the_makefile_on_every_python_of_the_classifiers() -> None:
    workflow = load(WORKFLOW)
    assert set(workflow[True]) == {"push", "pull_request"}, "YAML 1.1 reads the key `on` as true"
    assert workflow["permissions"] == {"contents": "read"}
    job = workflow["jobs"]["test"]
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == ["make test", "make docs", "make package"]
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.M)
    assert phony is not None
    for command in commands:
        target = command.removeprefix("make ")
        assert re.search(rf"^{target}:", MAKEFILE, re.M)
        assert f"make {target} " in MAKEFILE, f"`make help` does not name {target}"
        assert target in phony[1].split()
    assert job["env"]["PYTHON"] == "python"
    assert re.search(r"^PYTHON \?= ", MAKEFILE, re.M), "the environment's PYTHON must prevail"
    prefix = "Programming Language :: Python :: 3."
    versions = [f"3.{c.removeprefix(prefix)}" for c in PROJECT["project"]["classifiers"] if c.startswith(prefix)]
    assert job["strategy"]["matrix"]["python"] == versions
    assert PROJECT["project"]["requires-python"] == f">={versions[0]}"


def test_hooks_run_what_make_lint_runs() -> None:
    (repo,) = load(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repo["repo"] == "local", "nothing is fetched"
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.M)
    assert lint is not None
    linters = set(re.findall(r"\$\(BIN\)/(ruff \w+|mypy)", lint[1]))
    assert linters == {"ruff check", "ruff format", "mypy"}
    assert {hook["name"] for hook in repo["hooks"]} == linters
    for hook in repo["hooks"]:
        assert hook["entry"].startswith(f".venv/bin/{hook['name']}")
        assert hook["language"] == "system"


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms_have_what_github_asks_for(path: Path) -> None:
    form = load(path)
    assert {"name", "description", "body"} <= set(form)
    ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
    assert len(ids) == len(set(ids)) > 0
    for part in form["body"]:
        assert part["type"] in ("markdown", "input", "textarea")
        assert part["attributes"]["value" if part["type"] == "markdown" else "label"]
    assert any(part.get("validations", {}).get("required") for part in form["body"])


def test_there_is_a_form_for_a_bug_a_formula_and_a_feature_and_a_template_for_pull_requests() -> None:
    assert [path.stem for path in FORMS] == ["bug_report", "feature_request", "formula"]
    assert isinstance(load(ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml")["blank_issues_enabled"], bool)
    assert "make test" in (ROOT / ".github" / "pull_request_template.md").read_text()


def test_the_sdist_ships_every_file_that_git_tracks() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    include = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    ends = {name.partition("/")[0] for name in package.shipped(listed.splitlines())}
    assert ends - {"pyproject.toml"} <= {name.removeprefix("/") for name in include}  # hatchling adds that one
    assert all((ROOT / name.removeprefix("/")).exists() for name in include)


def test_what_an_archive_lacks_is_named(tmp_path: Path) -> None:
    files = package.shipped(["README.md", ".ci/run", ".gitignore", "src/depthmix/a.py", "src/depthmix/native/b.cpp"])
    assert files == ["README.md", "src/depthmix/a.py", "src/depthmix/native/b.cpp"]
    sdist, wheel = tmp_path / "d-1.tar.gz", tmp_path / "d-1.whl"
    with tarfile.open(sdist, "w:gz") as archive:
        for name in ("d-1/README.md", "d-1/src/depthmix/a.py"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("depthmix/a.py", "")
    assert package.missing_in_sdist(sdist, files) == ["src/depthmix/native/b.cpp"]
    assert package.missing_in_wheel(wheel, files) == ["depthmix/native/b.cpp"]
    with pytest.raises(SystemExit, match=r"d-1\.whl lacks depthmix/native/b\.cpp; add them under \[tool\.hatch"):
        package.report(wheel, ["depthmix/native/b.cpp"])
