"""Names of a model reach errors and the terminal on one line, without control characters."""

import pickle
import traceback

import pytest

import kfac_engine as ke
from kfac_engine import errors
from kfac_engine.printable import one_line, printable, quoted

ERRORS = [kind for kind in vars(errors).values() if str(kind).startswith("<class 'kfac_engine.err")]
CASES = {
    "escape sequence": ("a\x1b]0;title\x07b", r"a\x1b]0;title\x07b"),
    "several lines": ("a\r\nb", r"a\r\nb"),
    "text from right to left": ("a\u202eb", r"a\u202eb"),
    "half a pair": ("a\udc80b", r"a\udc80b"),
    "other alphabets": ("Ωмега 層 ·×⊗", "Ωмега 層 ·×⊗"),
    "blanks": ("a  b", "a  b"),
    "long word": ("x" + "y" * 400 + "z", f"x{'y' * 149}…{'y' * 149}z"),
    "name of usual length": ("n" * 300, "n" * 300),
}


@pytest.mark.parametrize(("text", "shown"), CASES.values(), ids=CASES)
def test_printable_replaces_control_characters(text, shown):
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("names", "most", "shown"),
    [
        ([], None, ""),
        (["a"], 1, "'a'"),
        (["a", "b"], None, "'a', 'b'"),
        (["a", "b"], 2, "'a', 'b'"),
        (["a", "b", "c"], 1, "'a' and 2 more"),
    ],
)
def test_lists_of_names_count_those_that_they_leave_out(names, most, shown):
    assert quoted(iter(names), most) == shown


def test_message_is_one_bounded_line():
    assert one_line("a\nb\t c") == "a b c"
    assert len(one_line("word " * 100_000)) <= 4001


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_error_shows_printable_message(kind):
    error = kind(f"no '\x1b[31m{'n' * 1_000_000}'\nhere.")
    if isinstance(error, ke.KfacError):
        assert str(error).startswith(r"no '\x1b[31mnnn")
        assert str(error).endswith("nnn' here.")
        assert len(str(error)) < 400
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
        shown = "".join(traceback.format_exception(error))
        assert "\x1b" not in shown
        assert len(shown) < 600


def test_error_without_message_is_empty():
    assert str(ke.UnknownNameError()) == str(ke.InputError()) == ""
