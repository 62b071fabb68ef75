"""The facts of a release agree."""

import re
import tomllib
from pathlib import Path

import kfac_engine as ke
from scripts.absolute_links import absolute
from scripts.check_release import disagreements

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]


def test_facts_of_this_release_agree():
    assert disagreements(f"v{ke.__version__}", REPOSITORY) == []


def test_site_links_to_the_same_repository():
    assert f"repo_url: {REPOSITORY}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_page_of_the_package_index_has_no_relative_link():
    text = absolute((ROOT / "README.md").read_text(encoding="utf-8"), REPOSITORY)
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert len(targets) > 20
    assert all(target.startswith(("https://", "#")) for target in targets)
