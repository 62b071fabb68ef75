"""The reference has every public name, and the site's hooks convert links and formulas."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import kfac_engine as ke

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = [*(ROOT / "docs/reference").glob("*.md")]


def test_reference_has_each_public_name_once():
    text = "".join(page.read_text(encoding="utf-8") for page in REFERENCE)
    names = re.findall(r"^::: kfac_engine\.(\w+)$", text, re.M)
    assert sorted(names) == sorted(set(ke.__all__) - {"__version__"})


@pytest.fixture
def hooks():
    pytest.importorskip("mkdocs")
    pytest.importorskip("latex2mathml")
    from scripts import site_hooks

    return site_hooks


def rewritten(hooks, site, text):
    """The text of a page of the site with its links rewritten; the site has three other pages."""
    pages = {"index.md", "training.md", "adr/0001.md", "repository/ARCHITECTURE.md"}
    files = SimpleNamespace(get_file_from_path=lambda path: path if path in pages else None)
    page = SimpleNamespace(file=SimpleNamespace(src_uri=site), meta={})
    config = SimpleNamespace(repo_url="https://host/project")
    return hooks.on_page_markdown(text, page=page, config=config, files=files)


@pytest.mark.parametrize(
    ("site", "link", "target"),
    [
        ("index.md", "docs/training.md#damping", "training.md#damping"),
        ("index.md", "ARCHITECTURE.md", "repository/ARCHITECTURE.md"),
        ("index.md", "bench/run.py", "https://host/project/blob/main/bench/run.py"),
        ("training.md", "../README.md", "index.md"),
        ("training.md", "adr/0001.md", "adr/0001.md"),
        ("adr/0001.md", "../training.md", "../training.md"),
        ("adr/0001.md", "../../ARCHITECTURE.md", "../repository/ARCHITECTURE.md"),
        ("repository/ARCHITECTURE.md", "docs/adr/0001.md", "../adr/0001.md"),
        # Not files of the repository:
        ("training.md", "#damping", "#damping"),
        ("training.md", "https://onnx.ai/docs", "https://onnx.ai/docs"),
    ],
)
def test_link_of_the_repository_becomes_link_of_the_site(hooks, site, link, target):
    assert rewritten(hooks, site, f"see [page]({link}).") == f"see [page]({target})."


def test_formula_becomes_mathml_and_other_text_remains(hooks):
    content = '<p>a <span class="arithmatex">\\(A \\otimes G\\)</span> b &lt; c</p>'
    drawn = hooks.on_page_content(content)
    assert drawn.startswith("<p>a <math ")
    assert "&#x02297;" in drawn
    assert drawn.endswith("</math> b &lt; c</p>")
    assert hooks.on_page_content("<p>no formula: \\(x\\)</p>") == "<p>no formula: \\(x\\)</p>"
