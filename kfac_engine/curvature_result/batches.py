"""Batches of a data set that are read once or twice."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from kfac_engine._types import Array
from kfac_engine.errors import InputError
from kfac_engine.losses.objective import Targets

Pair: TypeAlias = tuple[Mapping[str, Array], Targets]
Batches: TypeAlias = Pair | Iterable[Pair]


def pairs_of(batches: Batches, passes: int) -> Iterable[Pair]:
    """Return data as an iterable of pairs.

    Args:
        batches: One pair of inputs and targets, or an iterable of such pairs.
        passes: Number of times that the data are read.

    Returns:
        An iterable whose entries are checked when they are read.

    Raises:
        InputError: The data are no iterable, or an iterator that cannot be read again.
    """
    if _is_pair(batches):
        return [batches]  # type: ignore[list-item] # by _is_pair
    if not isinstance(batches, Iterable) or isinstance(batches, str | bytes | Mapping):
        raise InputError(
            f"batches must be one pair ({{'input': x}}, targets) or an iterable of such pairs, got "
            f"{type(batches).__name__}."
        )
    if passes > 1 and isinstance(batches, Iterator):
        raise InputError(
            f"the data are read {passes} times, but an iterator ({type(batches).__name__}) can be "
            f"read once; pass a list, or an object whose iter() starts again."
        )
    return batches  # type: ignore[return-value] # not a pair, by _is_pair


def checked_pair(pair: object, number: int) -> Pair:
    """Return an entry of batches.

    Args:
        pair: The entry.
        number: Its number, from 1.

    Returns:
        Inputs and targets.

    Raises:
        InputError: The entry is not a pair of a mapping and targets.
    """
    if not _is_pair(pair):
        raise InputError(
            f"batch {number} must be a pair ({{'input': x}}, targets), with None for targets that "
            f"are not needed; got {type(pair).__name__}."
        )
    return pair  # type: ignore[return-value] # by _is_pair


def _is_pair(value: object) -> bool:
    is_two = isinstance(value, tuple | list) and len(value) == 2
    return is_two and isinstance(value[0], Mapping)  # type: ignore[index] # a sequence
