"""Signals wait for the end of the context, and a second one does not."""

import os
import signal
import sys
from threading import Thread

import pytest

from kfac_engine.system.deferred_signals import SIGNALS, DeferredSignals

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


def test_an_error_in_the_context_comes_before_a_signal():
    with pytest.raises(ZeroDivisionError), DeferredSignals():  # noqa: PT012
        send()
        raise ZeroDivisionError


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
