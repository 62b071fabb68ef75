"""Ctrl-C at any place of a step leaves the state before the step or the state after it."""

import gc
import signal
import sys
from contextlib import suppress
from itertools import count

import pytest

import kfac_engine as ke
from tests.training import norm_net

PLACES = 25
EACH_STEP = {"statistics_every": 1, "refresh_every": 1}
# Each takes an engine; the result has ``step``, ``save`` and ``load``.
STEPS = {
    "engine": lambda e: e,
    "sgd": lambda e: ke.SGD(e, 0.1),
    "adam": ke.Adam,
    "adamw": ke.AdamW,
    "muon": ke.Muon,
    "kfac": lambda e: ke.KfacOptimizer(e, **EACH_STEP),
    "kfac-rate": lambda e: ke.KfacOptimizer(e, 0.1, adapt_damping=True, **EACH_STEP),
    "kfac-quadratic": lambda e: ke.KfacOptimizer(e, "quadratic", momentum="quadratic", **EACH_STEP),
    "kfac-skips": lambda e: ke.KfacOptimizer(e, 1e39, non_finite="skip", **EACH_STEP),
}


@pytest.fixture(autouse=True)
def handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # Python ignores what a signal raises in a finalizer
    yield
    gc.enable()
    signal.signal(signal.SIGINT, before)


def interrupted_at(place, call):
    """Call a function with a signal at one of its calls; return the number of its calls."""
    calls = count()

    def profile(frame, event, argument):
        if event in {"call", "c_call"} and next(calls) == place:
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return next(calls)


@pytest.mark.parametrize("name", STEPS)
def test_a_signal_at_any_place_of_a_step_leaves_no_half_step(name, tmp_path):
    x, y = norm_net.batch()
    stepping = STEPS[name](norm_net.engine())
    before, after, now = [tmp_path / n for n in ("before", "after", "now")]
    for n in (48, 20, 20):  # further steps make the same calls
        stepping.step({"x": x[:n]}, y[:n])
    stepping.save(before)
    stepping.load(before)
    calls = interrupted_at(None, lambda: stepping.step({"x": x[:20]}, y[:20]))
    stepping.save(after)
    assert before.read_bytes() != after.read_bytes()
    seen = set()
    for place in range(3, calls, max(1, calls // PLACES)):
        stepping.load(before)
        with suppress(KeyboardInterrupt):
            made = interrupted_at(place, lambda: stepping.step({"x": x[:20]}, y[:20]))
            # Threads make a few calls more or less.
            assert made <= place, f"the signal at call {place} of {made} had no effect"
        stepping.save(now)
        state = now.read_bytes()
        one_of = {before.read_bytes(): "before", after.read_bytes(): "after"}
        assert one_of.get(state), f"call {place} of {calls}"
        seen.add(state)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert after.read_bytes() in seen
