"""Pages outside the tutorials that the site executes run in order."""

from pathlib import Path

import pytest

from scripts.site_hooks import requirement
from tests.pages import all_blocks
from tests.test_tutorials import execute

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ["change_a_file", "recognise"]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::kfac_engine.errors.InferenceFormWarning")
@pytest.mark.parametrize("name", PAGES)
def test_the_examples_of_the_page_run_in_order(name, tmp_path):
    page = DOCS / f"{name}.md"
    missing = requirement(page.read_text(encoding="utf-8"))
    if missing:
        pytest.skip(f"{missing} is not installed")
    execute(page, tmp_path)


def test_each_page_that_the_site_executes_has_a_case():
    executed = {
        page.stem
        for page in DOCS.glob("*.md")
        if any('exec="on"' in block.options for block in all_blocks(page))
    }
    assert executed == set(PAGES)
