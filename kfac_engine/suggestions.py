"""The known name that is nearest to an unknown one, for error messages."""

from collections.abc import Iterable
from difflib import get_close_matches

# Least similarity, as difflib measures it. At its default of 0.6, 'convolution' is near to
# 'precondition'.
_LEAST_SIMILARITY = 0.7


def suggestion(name: object, known: Iterable[str]) -> str:
    """Return `` (did you mean 'NAME'?)`` with the nearest known name.

    Args:
        name: An unknown name, or a pattern of names that matches none.
        known: The names that exist.

    Returns:
        The text to follow the unknown name in a message; empty if no known name is near. Letters
        that differ in case only count as equal.
    """
    folded = {entry.casefold(): entry for entry in known}
    near = get_close_matches(str(name).casefold(), folded, 1, _LEAST_SIMILARITY)
    return f" (did you mean '{folded[near[0]]}'?)" if near else ""
