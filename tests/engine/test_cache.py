"""Attention with a cache of earlier keys, which is empty at first."""

import numpy as np
import pytest

import kfac_engine as ke
from tests import models
from tests.comparing import assert_arrays_close

ROUNDING = 1e-6


def attention(cache):
    net = models.Net()
    own = net.op("MatMul", "input", net.weight("w", 5, 4), to="own")
    keys = net.op("Concat", "past", own, to="keys", axis=1) if cache else own
    turned = net.op("Transpose", keys, to="turned", perm=[0, 2, 1])
    scores = net.op("MatMul", own, turned, to="scores")
    seen = net.op("MatMul", net.op("Softmax", scores, to="seen_by", axis=-1), keys, to="seen")
    net.op("MatMul", seen, net.weight("v", 4, 3), to="output")
    inputs = {"input": ["batch", "tokens", 5]}
    past = {"past": ["batch", "earlier", 4]} if cache else {}
    return net.model({**inputs, **past}, {"output": ["batch", "tokens", 3]})


@pytest.mark.parametrize("sampled", [True, False])
def test_a_cache_without_entries_is_no_cache(sampled):
    rng = np.random.default_rng(0)
    x = {"input": rng.normal(size=(2, 6, 5)).astype(np.float32)}
    empty = x | {"past": np.zeros((2, 0, 4), np.float32)}
    targets = rng.integers(0, 3, (2, 6))
    engine = ke.Engine.from_onnx(
        attention(True), loss="categorical", sample_inputs=empty if sampled else None
    )
    found = engine.gradients(empty, targets)
    wanted = ke.Engine.from_onnx(attention(False), loss="categorical").gradients(x, targets)
    assert found.loss == pytest.approx(wanted.loss, rel=ROUNDING)
    assert_arrays_close(found.gradients, wanted.gradients, atol=ROUNDING)
    longer = x | {"past": rng.normal(size=(2, 3, 4)).astype(np.float32)}
    assert engine.gradients(longer, targets).loss != pytest.approx(wanted.loss, rel=1e-3)
