"""Refresh of many factors: recompute the inverses and powers that factors store.

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
    """Recompute everything registered with factors from their averages and dampings.

    Results are stored after the first requests of all factors were computed.

    Args:
        factors: Factors; a factor that stores nothing is skipped.
        backend: Array library of the factors.

    Raises:
        NotReadyError: A factor has no average yet.
        NonFiniteError: An average holds NaN or infinity.
        InputError: A damping is wrong, or a damped matrix has no such power.
    """
    begin_refresh(factors, backend)()


def begin_refresh(factors: Sequence[Refreshable], backend: Backend) -> Callable[[], None]:
    """Begin a refresh, so that a device computes inverses while the host continues.

    Args:
        factors: As for ``refresh``.
        backend: As for ``refresh``.

    Returns:
        A function that waits for the results and stores them at its first call. A factor calls it
        before its average changes. It raises an InputError as ``refresh`` does.

    Raises:
        NotReadyError: As for ``refresh``.
        NonFiniteError: As for ``refresh``.
    """
    due = [factor for factor in factors if factor.has_inverses]
    for factor in due:
        factor.wait()
    with _measured(due, backend):
        refreshes = [factor.refreshing() for factor in due]
        requests = [next(refreshing) for refreshing in refreshes]
    results = begin_requests([r for of_factor in requests for r in of_factor], backend)

    def finish() -> None:
        for factor in due:
            factor.set_pending(None)
        _store(refreshes, requests, results, backend)

    for factor in due:
        factor.set_pending(finish)
    return due[0].wait if due else lambda: None


def _store(
    refreshes: Sequence[Refreshing],
    requests: Sequence[Sequence[Request]],
    results: Callable[[], list[Result]],
    backend: Backend,
) -> None:
    """Send results to the factors that requested them, and compute their further requests."""
    while refreshes:
        following = iter(results())
        results_of = [[next(following) for _ in of_factor] for of_factor in requests]
        sent = [(r, _send(r, answers)) for r, answers in zip(refreshes, results_of, strict=True)]
        unfinished = [(r, of_factor) for r, of_factor in sent if of_factor is not None]
        refreshes = [r for r, _ in unfinished]
        requests = [of_factor for _, of_factor in unfinished]
        results = begin_requests([r for of_factor in requests for r in of_factor], backend)


def _send(refreshing: Refreshing, results: Sequence[Result]) -> Sequence[Request] | None:
    """Send results to a factor; return its further requests, or None if it has finished."""
    try:
        return refreshing.send(results)
    except StopIteration:
        return None


@contextmanager
def _measured(due: Sequence[Refreshable], backend: Backend) -> Iterator[None]:
    """Check that averages are finite, and provide the traces that dampings depend on.

    One transfer from a device serves all averages and traces.

    Raises:
        NonFiniteError: An average holds NaN or infinity.
    """
    averages = {name: average for factor in due for name, average in factor.averages().items()}
    dampings = (damping for factor in due for damping in factor.dampings())
    split = list({id(f): f for d in dampings for f in getattr(d, "factors", ())}.values())
    measured = [factor.measured_traces() for factor in split]
    arrays = [average.lower(name) for name, average in averages.items()]
    finite, *traces = backend.download([backend.are_finite(arrays), *measured])
    for name, is_finite in zip(averages, finite, strict=True):
        # Entries above the diagonal are not defined before ``read``.
        if not is_finite and not _is_finite(averages[name].read(name), backend):
            raise NonFiniteError(f"the average of {name} holds NaN or infinity.")
    for factor, of_factor in zip(split, traces, strict=True):
        factor.known_traces = of_factor
    try:
        yield
    finally:
        for factor in split:
            factor.known_traces = None


def _is_finite(array: Array, backend: Backend) -> bool:
    return bool(backend.download([backend.are_finite([array])])[0].all())
