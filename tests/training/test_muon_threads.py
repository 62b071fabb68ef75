"""Muon's products limit BLAS to one thread; the threads of the engine divide them."""

from threadpoolctl import threadpool_info, threadpool_limits

import kfac_engine as ke
from kfac_engine.training import rules
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
