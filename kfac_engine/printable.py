"""Text of untrusted origin, made fit to be shown: names in a model hold anything, at any length."""

import re

# Longer words are cut: names and paths of people and exporters have up to 200 characters.
_MOST_IN_WORD = 300
_MOST_IN_LINE = 4000
_LONG_WORD = re.compile(rf"\S{{{_MOST_IN_WORD + 1},}}")


def printable(text: str) -> str:
    """A text whose control characters are escaped and whose longest words lack their middle."""
    text = _LONG_WORD.sub(lambda word: _cut(word[0], _MOST_IN_WORD), text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """A printable text on one line that is not endless."""
    return _cut(printable(" ".join(text.split())), _MOST_IN_LINE)


def _cut(text: str, most: int) -> str:
    """A text without its middle, where it is longer than ``most`` characters."""
    kept = most // 2
    return text if len(text) <= most else f"{text[:kept]}…{text[-kept:]}"
