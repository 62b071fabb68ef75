"""Refresh of many factors: recomputes what each factor stores beside its average.

A factor yields requests and receives their results (``FisherFactor.refreshing``).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from kfac_engine._types import Array
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.factors.average import MovingAverage
from kfac_engine.curvature.factors.damping import Damping
from kfac_engine.curvature.factors.requests import Refreshing, Request, Result, begin_requests
from kfac_engine.errors import NonFiniteError


class Refreshable(Protocol):
    """The part of a factor that a refresh uses; see ``FisherFactor`` for each member."""

    @property
    def has_inverses(self) -> bool:
        """Whether anything is stored beside the average."""

    def averages(self) -> Mapping[str, MovingAverage]:
        """The averages that a refresh reads, by name."""

    def dampings(self) -> Iterable[Damping]:
        """The dampings of everything registered."""

    def refreshing(self) -> Refreshing:
        """Yields requests and stores the results that it is sent."""

    def wait(self) -> None:
        """Complete a refresh that was begun."""

    def set_pending(self, finish: Callable[[], None] | None) -> None:
        """Set the function that ``wait`` calls."""


def refresh(factors: Sequence[Refreshable], backend: Backend) -> None:
    """Recompute everything registered with these factors from their averages and dampings.

    Nothing is stored before everything asked for at first was computed.

    Args:
        factors: Any; those that store nothing are passed over.
        backend: The array library of all of them.

    Raises:
        NotReadyError: One has no average yet.
        NonFiniteError: An average holds NaN or infinity.
        InputError: A damping is wrong, or a matrix with its damping has not the power asked for.
    """
    begin_refresh(factors, backend)()


def begin_refresh(factors: Sequence[Refreshable], backend: Backend) -> Callable[[], None]:
    """A refresh in two steps, so that a device works on inverses while the host goes on.

    Args:
        factors: As for ``refresh``.
        backend: As for ``refresh``.

    Returns:
        Waits for the results and stores them, when it is called for the first time; a factor whose
        average is about to change calls it. Raises an InputError as ``refresh`` does.

    Raises:
        NotReadyError: As for ``refresh``.
        NonFiniteError: As for ``refresh``.
    """
    due = [factor for factor in factors if factor.has_inverses]
    for factor in due:
        factor.wait()
    with _measured(due, backend):
        rounds = [factor.refreshing() for factor in due]
        asked = [next(one) for one in rounds]
    begun = begin_requests([r for requests in asked for r in requests], backend)

    def finish() -> None:
        for factor in due:
            factor.set_pending(None)
        _stored(rounds, asked, begun, backend)

    for factor in due:
        factor.set_pending(finish)
    return due[0].wait if due else lambda: None


def _stored(
    rounds: Sequence[Refreshing],
    asked: Sequence[Sequence[Request]],
    results: Callable[[], list[Result]],
    backend: Backend,
) -> None:
    """Send results to the factors that asked, and do what they ask for next."""
    while rounds:
        found = iter(results())
        shares = [[next(found) for _ in requests] for requests in asked]
        following = [(one, _sent(one, share)) for one, share in zip(rounds, shares, strict=True)]
        going = [(one, requests) for one, requests in following if requests is not None]
        rounds, asked = [one for one, _ in going], [requests for _, requests in going]
        results = begin_requests([r for requests in asked for r in requests], backend)


def _sent(one: Refreshing, results: Sequence[Result]) -> Sequence[Request] | None:
    """What a factor asks for next; None where it has finished."""
    try:
        return one.send(results)
    except StopIteration:
        return None


@contextmanager
def _measured(due: Sequence[Refreshable], backend: Backend) -> Iterator[None]:
    """Averages were found finite, and traces that dampings depend on need no reading of a device.

    Raises:
        NonFiniteError: An average holds NaN or infinity.
    """
    averages = {name: average for factor in due for name, average in factor.averages().items()}
    dampings = (damping for factor in due for damping in factor.dampings())
    sides = list({id(side): side for d in dampings for side in getattr(d, "sides", ())}.values())
    asked = [side.measured_traces() for side in sides]
    arrays = [average.lower(name) for name, average in averages.items()]
    finite, *found = backend.download([backend.are_finite(arrays), *asked])
    for name, is_finite in zip(averages, finite, strict=True):
        # Above the diagonal there may have been anything.
        if not is_finite and not _is_finite(averages[name].read(name), backend):
            raise NonFiniteError(f"the average of {name} holds NaN or infinity.")
    for side, traces in zip(sides, found, strict=True):
        side.known_traces = traces
    try:
        yield
    finally:
        for side in sides:
            side.known_traces = None


def _is_finite(array: Array, backend: Backend) -> bool:
    return bool(backend.download([backend.are_finite([array])])[0].all())
