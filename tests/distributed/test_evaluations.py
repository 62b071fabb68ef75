"""Losses, metrics, products and statistics of several ranks are those of the whole batch."""

import numpy as np
import pytest

import kfac_engine as ke
from tests.comparing import assert_arrays_near
from tests.distributed.threads import rows_of, run
from tests.training import softmax_net as net

CUTS = {2: [0, 9, 24], 3: [0, 1, 12, 24]}


def engine(communicator=None, **options):
    options = {"loss": "categorical", "threads": 1, **options}
    return ke.Engine.from_onnx(net.model(), communicator=communicator, **options)


def largest(outputs, targets):
    return outputs.max(1)


METRICS = ["loss", "accuracy", "top2", largest]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_metrics_are_those_of_the_data_of_all_ranks(reduction):
    x, y = net.batch(0, n=24)
    expected = engine(reduction=reduction).evaluate(({"x": x}, y), METRICS)

    def work(communicator):
        rows = rows_of(communicator, CUTS)
        stops = [(i, min(i + 4, rows.stop)) for i in range(rows.start, rows.stop, 4)]
        pairs = [({"x": x[start:stop]}, y[start:stop]) for start, stop in stops]
        return engine(communicator, reduction=reduction).evaluate(pairs, METRICS)

    for size in CUTS:
        for values in run(size, work):
            assert values == pytest.approx(expected, rel=1e-12)


def test_a_rank_may_have_no_batch_to_evaluate_but_not_all_of_them():
    x, y = net.batch(0, n=24)

    def work(communicator):
        ranks = engine(communicator)
        values = ranks.evaluate([] if communicator.rank else ({"x": x}, y))
        with pytest.raises(ke.InputError, match="no batch"):
            ranks.evaluate([])
        with pytest.raises(ke.ShapeError, match="rank 1 of 2 refused"):
            ranks.evaluate(({"x": x[:, communicator.rank :]}, y))
        return values

    for values in run(2, work):
        assert values == pytest.approx(engine().evaluate(({"x": x}, y)))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("part", [None, 8])
def test_products_are_those_of_the_whole_batch(reduction, part):
    """Where the traces are those of parts, the products belong to the larger batch."""
    x, y = net.batch(0, n=24)
    alone = engine(reduction=reduction)
    vectors = [{n: np.cos(k + v) for n, v in alone.parameters.items()} for k in range(2)]

    def products(model, x, y, examples):
        of = model.curvature_products(model.trace({"x": x}, y), examples)
        return {
            "fisher": of.multiply_fisher(vectors[0]),
            "ggn": of.multiply_ggn(vectors[0]),
            "hessian": of.multiply_hessian(vectors[0]),
        }, of.quadratic_forms(*vectors)

    wanted, forms = products(alone, x, y, part and part * 24)

    def work(communicator):
        rows = rows_of(communicator, CUTS)
        count = len(range(24)[rows])
        model = engine(communicator, reduction=reduction)
        return products(model, x[rows], y[rows], part and part * count)

    for size in CUTS:
        for arrays, own_forms in run(size, work):
            np.testing.assert_allclose(own_forms, forms, rtol=1e-12)
            for kind, vector in wanted.items():
                assert_arrays_near(arrays[kind], vector, 1e-12)


@pytest.mark.parametrize("mode", ["gradients", "empirical", "exact"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_statistics_of_a_part_are_those_of_one_process(reduction, mode):
    x, y = net.batch(0, n=24)
    options = {"reduction": reduction, "estimation_mode": mode}
    alone = engine(**options)
    for _ in range(2):
        alone.update_statistics(alone.trace({"x": x}, y), 240)

    def work(communicator):
        rows = rows_of(communicator, CUTS)
        ranks = engine(communicator, **options)
        for _ in range(2):
            ranks.update_statistics(ranks.trace({"x": x[rows]}, y[rows]), 240 // communicator.size)
        with pytest.raises(ke.UnsupportedError, match="update_statistics"):
            ranks.estimator.update_covariances(ranks.trace({"x": x[rows]}, y[rows]))
        ranks.synchronize()
        return [factor.cov for factor in ranks.estimator.factors]

    for size in CUTS:
        for averages in run(size, work):
            for average, factor in zip(averages, alone.estimator.factors, strict=True):
                assert_arrays_near({"": average}, {"": factor.cov}, 1e-12)


def test_observations_give_the_inverses_of_one_process():
    alone, schedule = engine(), ke.Schedule(refresh_every=2)
    alone.schedule = schedule
    batches = [net.batch(seed, n=24) for seed in range(4)]
    for x, _ in batches:
        alone.observe({"x": x})
    vector = {n: np.cos(v) for n, v in alone.parameters.items()}
    expected = alone.precondition(vector)

    def work(communicator):
        rows = rows_of(communicator, CUTS)
        distribution = ("replicate", "shard")[communicator.size - 2]
        ranks = engine(communicator, schedule=schedule, distribution=distribution)
        for x, _ in batches:
            ranks.observe({"x": x[rows]})
        return ranks.precondition(vector)

    for size in CUTS:
        for natural in run(size, work):
            assert_arrays_near(natural, expected, 1e-12)
