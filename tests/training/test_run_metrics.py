"""Metrics of the validation in the records of a run."""

import numpy as np
import pytest

import kfac_engine as ke
from tests.training import softmax_net as net


def options():
    return {"optimizer": "sgd", "epochs": 1, "batch_size": 20}


def test_a_metric_may_be_a_function():
    def margin(outputs, targets):
        best = np.sort(outputs, axis=1)
        return best[:, -1] - best[:, -2]

    x, y = net.batch(7, n=20)
    history = ke.fit(
        net.engine(), net.batch(n=50), validation=(x, y), metrics=[margin, "top2"], **options()
    )
    z = np.sort(net.forward(history.engine.parameters, x)[1], axis=1)
    record = history.records[-1]
    assert record["margin"] == pytest.approx((z[:, 2] - z[:, 1]).mean(), rel=1e-12)
    assert 0 < record["top2"] <= 1


def test_a_metric_with_the_name_of_another_number_is_refused():
    def damping(outputs, targets):
        return targets

    with pytest.raises(ke.InputError, match="'damping' is the name of another number in records"):
        ke.fit(net.engine(), net.batch(n=50), metrics=[damping], **options())
