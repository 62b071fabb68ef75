"""Makes untrusted text, such as the names in a model file, safe to print."""

import re
from collections.abc import Iterable

# Longer words are shortened. Names and paths in practice have up to 200 characters.
_MOST_IN_WORD = 300
_MOST_IN_LINE = 4000
_LONG_WORD = re.compile(rf"\S{{{_MOST_IN_WORD + 1},}}")


def printable(text: str) -> str:
    """Return the text with control characters escaped and long words shortened in the middle."""
    text = _LONG_WORD.sub(lambda word: _cut(word[0], _MOST_IN_WORD), text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """Return the text in printable form, on one line of at most 4000 characters."""
    return _cut(printable(" ".join(text.split())), _MOST_IN_LINE)


def shortened(text: str, most: int) -> str:
    """Return the text in printable form, shortened in the middle to about ``most`` characters."""
    # The first cut bounds the time for long texts, the second the length of escapes.
    return _cut(printable(_cut(text, most)), most)


def quoted(names: Iterable[str], most: int | None = None) -> str:
    """Return the first ``most`` names in quotes, and how many more there are, for a message."""
    shown = [f"'{name}'" for name in names]
    more = len(shown) - (most or len(shown))
    return ", ".join(shown[:most]) + (f" and {more} more" if more > 0 else "")


def _cut(text: str, most: int) -> str:
    """Return the text, shortened in the middle if it has more than ``most`` characters."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"
