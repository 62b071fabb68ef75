"""The page of approximations is the table in the code."""

from scripts.list_approximations import PAGE, page


def test_the_page_is_what_the_table_says():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m scripts.list_approximations"
