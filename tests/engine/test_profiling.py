"""Stages are told when asked for, in order, with times that add up."""

import sys
from time import perf_counter, sleep

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.engine.profiling import StageClock
from tests import models

STAGES = ["forward", "backward", "statistics", "inverses", "precondition"]


def test_a_step_tells_its_stages_only_when_asked():
    model = models.mlp()
    inputs = models.random_inputs(model, 6)
    engine = ke.Engine.from_onnx(model, loss="categorical")
    targets = np.zeros(6, np.int64)
    assert engine.step(inputs, targets).stages == ()
    start = perf_counter()
    stages = engine.step(inputs, targets, profile=True).stages
    assert [stage.name for stage in stages] == STAGES
    assert sum(stage.seconds for stage in stages) <= perf_counter() - start


def test_a_stage_that_comes_twice_is_summed_up():
    clock = StageClock(memory=True)
    for _ in range(2):
        with clock("nap"):
            sleep(0.01)
    (stage,) = clock.stages
    assert 0.02 <= stage.seconds < 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self")
def test_memory_of_a_stage_is_what_it_takes_at_most():
    clock = StageClock(memory=True)
    with clock("array"):
        np.ones(1 << 23).sum()
    (stage,) = clock.stages
    # Within 8 MiB: the kernel counts pages in batches for each core, and the interpreter takes and
    # returns pages meanwhile.
    assert abs(stage.nbytes - (1 << 26)) < 1 << 23
