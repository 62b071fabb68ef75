"""Muon divides parameters among threads, and the products of a parameter use one thread."""

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

import kfac_engine as ke
from kfac_engine.backend import tasks
from kfac_engine.training import rules
from tests import models
from tests.training import softmax_net as net


def test_products_of_muon_use_one_thread_each(monkeypatch):
    # Threads of two BLAS libraries that wait for each other double the CPU time of a step.
    seen, orthogonalize = [], rules.orthogonalize

    def recorded(matrix, matmul):
        blas = [info for info in threadpool_info() if info["user_api"] == "blas"]
        seen.extend(info["num_threads"] for info in blas)
        return orthogonalize(matrix, matmul)

    monkeypatch.setattr(rules, "orthogonalize", recorded)
    with threadpool_limits(2, user_api="blas"):
        ke.Muon(net.engine()).step({"x": net.batch()[0]}, net.batch()[1])
    assert set(seen) == {1}


def test_parallel_updates_of_muon_have_the_bits_of_one_thread(monkeypatch):
    sizes = (320, 320, 320)
    assert 2 * rules.Orthogonalized(0.95, True).work(sizes[:2]) > tasks.WORTH_WAKING
    rng, values = np.random.default_rng(0), []
    engines = [
        ke.Engine.from_onnx(models.mlp(sizes), loss="categorical", threads=n) for n in (1, 2)
    ]
    shapes = {name: value.shape for name, value in engines[0].parameters.items()}
    drawn = {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}
    equal = lambda *_: (0.0, {name: array.copy() for name, array in drawn.items()})  # noqa: E731
    monkeypatch.setattr(ke.Muon, "_gradients", equal)
    for engine in engines:
        ke.Muon(engine).step({}, None)
        values.append(engine.parameters)
    for name in shapes:
        np.testing.assert_array_equal(values[0][name], values[1][name])
