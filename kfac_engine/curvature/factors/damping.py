"""The type of the damping of a registered power."""

from collections.abc import Callable, Hashable
from typing import TypeAlias

from kfac_engine._types import Array

# Returns the current damping; called at each refresh. Two callables with equal hashable attributes
# ``func_id`` are the same registration.
Damping: TypeAlias = Callable[[], "Level"]
# A number, or a number for each matrix of a stack.
Level: TypeAlias = float | Array


def damping_id(damping_func: Damping) -> Hashable:
    """Return the key of a registration: the callable's ``func_id``, or the callable itself."""
    identity: Hashable = getattr(damping_func, "func_id", damping_func)
    return identity
