"""The facts of a release agree, and ``scripts.check_release`` notices each that does not."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest

import kfac_engine as ke
from scripts.absolute_links import absolute
from scripts.check_release import disagreements

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]
FILES = ("CHANGELOG.md", "CITATION.cff", "pyproject.toml", "kfac_engine/__init__.py", "mkdocs.yml")


@pytest.fixture
def checkout(tmp_path):
    for file in FILES:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def test_facts_of_this_release_agree():
    assert disagreements(f"v{ke.__version__}", REPOSITORY) == []


def test_tag_of_another_version_is_refused():
    assert "The tag is v9.9.9" in disagreements("v9.9.9", REPOSITORY)[0]


def test_other_repository_is_refused():
    (sentence,) = disagreements(f"v{ke.__version__}", "https://example.org/copy")
    assert "https://example.org/copy" in sentence


@pytest.mark.parametrize(
    ("file", "pattern", "replacement", "claim"),
    [
        ("CHANGELOG.md", r"^## \[\d.*$", "## [Soon]", "no section"),
        ("CITATION.cff", r"^version: .*$", "version: 9.9.9", "another version"),
        ("CITATION.cff", r"^date-released: .*$", "date-released: 1999-01-01", "another date"),
        ("kfac_engine/__init__.py", r"^__version__ = .*$", '__version__ = "9.9.9"', "The tag is"),
    ],
)
def test_disagreement_of_one_file_is_refused(checkout, file, pattern, replacement, claim):
    path = checkout / file
    text = path.read_text(encoding="utf-8")
    path.write_text(re.sub(pattern, replacement, text, count=1, flags=re.M), encoding="utf-8")
    assert any(claim in it for it in disagreements(f"v{ke.__version__}", REPOSITORY, checkout))


def test_site_links_to_the_same_repository():
    assert f"repo_url: {REPOSITORY}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("link", "result"),
    [
        ("[a](docs/a.md#b)", "[a](https://host/p/blob/main/docs/a.md#b)"),
        ("![a](docs/a.png)", "![a](https://host/p/raw/main/docs/a.png)"),
        ("[a](https://onnx.ai)", "[a](https://onnx.ai)"),
        ("[a](#install)", "[a](#install)"),
    ],
)
def test_relative_link_becomes_an_address(link, result):
    assert absolute(f"see {link}.", "https://host/p") == f"see {result}."


def test_page_of_the_package_index_has_no_relative_link():
    text = absolute((ROOT / "README.md").read_text(encoding="utf-8"), REPOSITORY)
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert len(targets) > 20
    assert all(target.startswith(("https://", "#")) for target in targets)
