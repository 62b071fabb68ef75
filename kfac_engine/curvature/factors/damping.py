"""The damping of a registered power, as factors take it."""

from collections.abc import Callable, Hashable
from typing import TypeAlias

from kfac_engine._types import Array

# A callable giving the current damping; read at refresh time. A hashable attribute ``func_id``
# lets two callables mean the same registration.
Damping: TypeAlias = Callable[[], "Level"]
# One number, or one for each matrix of a stack.
Level: TypeAlias = float | Array


def damping_id(damping_func: Damping) -> Hashable:
    """What identifies a registration: ``func_id`` where the callable has one, else the callable."""
    identity: Hashable = getattr(damping_func, "func_id", damping_func)
    return identity
