"""What statistics read of a batch, as arrays of a backend."""

from collections.abc import Iterable

from kfac_engine._types import Array
from kfac_engine.backend.protocol import Backend
from kfac_engine.errors import UnknownNameError
from kfac_engine.losses.checks import Named


def take(values: Named, names: Iterable[str], backend: Backend) -> dict[str, Array]:
    """Some values of a batch, as arrays of the backend.

    Args:
        values: Value name to array, of any library.
        names: Which.
        backend: Array library.

    Returns:
        Name to array; the caller's own memory where possible.

    Raises:
        UnknownNameError: A value is missing.
    """
    found: dict[str, Array] = {}
    for name in names:
        try:
            found[name] = backend.asarray(values[name])
        except KeyError as missing:
            raise UnknownNameError(
                f"the statistics read '{name}', but the batch has no value of that name."
            ) from missing
    return found
