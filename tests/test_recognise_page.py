"""The page on CTC runs as the site executes it, with and without the package that it names."""

from pathlib import Path

import pytest

from tests.pages import all_blocks

PAGE = Path(__file__).parent.parent / "docs" / "recognise.md"


@pytest.mark.nightly
def test_the_examples_of_the_page_run_in_order(capsys):
    names = {}
    for language, options, code in all_blocks(PAGE):
        if language == "python":
            assert 'exec="on"' in options
            exec(compile(code, "recognise.md", "exec"), names)
            assert bool(capsys.readouterr().out) == ("result=" in options), code
