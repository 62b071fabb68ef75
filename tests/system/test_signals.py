"""Signals wait for the end of the context, and a second one does not."""

import os
import signal
import sys
from threading import Thread

import pytest

from kfac_engine.system.signals import SIGNALS, DeferredSignals, HeldInterrupts

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends signals")


def send(number=signal.SIGINT):
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def handlers():
    """The handlers of a program in the foreground, which are put back."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_waits_for_the_end_of_the_context():
    reached = []
    with pytest.raises(KeyboardInterrupt), DeferredSignals() as signals:  # noqa: PT012
        assert signals.received is None
        send()
        reached.append(signals.received)
    assert reached == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_every_signal_reaches_its_own_handler():
    calls = []
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: calls.append(number))
    for number in SIGNALS:
        with DeferredSignals():
            send(number)
            assert len(calls) == SIGNALS.index(number)
    assert tuple(calls) == SIGNALS


def test_a_second_signal_has_its_effect_at_once():
    reached = []
    with pytest.raises(KeyboardInterrupt), DeferredSignals():  # noqa: PT012
        send()
        reached.append(1)
        send()
        reached.append(2)
    assert reached == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("context", [DeferredSignals, HeldInterrupts])
def test_a_signal_follows_the_error_that_ends_the_context(context):
    with pytest.raises(KeyboardInterrupt) as caught, context():  # noqa: PT012
        send()
        raise ZeroDivisionError
    assert isinstance(caught.value.__context__, ZeroDivisionError)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_run_at_once_and_their_exceptions_at_the_end():
    calls = []

    def count(number, frame):
        calls.append(number)

    def refuse(number, frame):
        raise TimeoutError

    signal.signal(signal.SIGTERM, count)
    alarm = signal.signal(signal.SIGALRM, refuse)
    try:
        with pytest.raises(TimeoutError), HeldInterrupts(), HeldInterrupts():  # noqa: PT012
            for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGTERM):
                send(number)
        assert signal.getsignal(signal.SIGALRM) is refuse
    finally:
        signal.signal(signal.SIGALRM, alarm)
    assert calls == [signal.SIGTERM, signal.SIGTERM]


def test_a_second_exception_of_a_handler_ends_the_context():
    reached = []
    with pytest.raises(KeyboardInterrupt), HeldInterrupts():  # noqa: PT012
        send()
        reached.append(1)
        send()
        reached.append(2)
    assert reached == [1]


def test_a_signal_in_a_held_context_waits_for_the_context_around_it():
    reached = []
    with pytest.raises(KeyboardInterrupt), DeferredSignals() as signals:  # noqa: PT012
        with HeldInterrupts():
            send()
        reached.append(signals.received)
    assert reached == [signal.SIGINT]


def test_an_ignored_signal_and_an_inactive_context_change_nothing():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with DeferredSignals() as signals:
        send()
    assert signals.received is None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), DeferredSignals(active=False):
        send()


def test_another_thread_has_no_handlers():
    failures = []

    def enter():
        try:
            with DeferredSignals():
                pass
        except ValueError as failure:
            failures.append(failure)

    thread = Thread(target=enter)
    thread.start()
    thread.join()
    assert not failures
