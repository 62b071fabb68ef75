"""What can be set on an optimizer is part of its state."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine import sealed
from tests.training import softmax_net as net

SETTABLE = {"learning_rate": 0.0125, "damping": 0.5}


@pytest.mark.parametrize(
    "make",
    [
        lambda e: ke.SGD(e, 0.1),
        ke.Adam,
        ke.AdamW,
        ke.Muon,
        ke.GaussNewton,
        ke.KfacOptimizer,
        lambda e: ke.KfacOptimizer(e, 0.1),
        lambda e: ke.KfacOptimizer(e, "quadratic"),
        lambda e: ke.KfacOptimizer(e, adapt_damping=True),
    ],
)
def test_every_attribute_that_can_be_set_is_part_of_the_state(make, tmp_path):
    one, other = make(net.engine()), make(net.engine())
    names = sealed._settable(type(one))
    assert names
    for name in names:
        assert getattr(one, name) != SETTABLE[name]
        setattr(one, name, SETTABLE[name])
    one.save(tmp_path / "state")
    other.load(tmp_path / "state")
    assert {name: getattr(other, name) for name in names} == {n: SETTABLE[n] for n in names}
    x, y = net.batch()
    reports = [optimizer.step({"x": x}, y) for optimizer in (one, other)]
    assert reports[0].learning_rate == reports[1].learning_rate
    for name, value in one.engine.parameters.items():
        assert np.array_equal(value, other.engine.parameters[name])


@pytest.mark.parametrize("kinds", [(ke.RelativeDamping, float), (float, ke.RelativeDamping)])
def test_a_state_with_damping_of_another_kind_is_refused(kinds, tmp_path):
    one, other = (ke.KfacOptimizer(net.engine(), 0.1, damping=kind(0.2)) for kind in kinds)
    one.save(tmp_path / "state")
    with pytest.raises(ke.InputError, match="'relative'"):
        other.load(tmp_path / "state")
    again = ke.KfacOptimizer(net.engine(), 0.1, damping=kinds[0](0.3))
    again.load(tmp_path / "state")
    assert repr(again.damping) == repr(kinds[0](0.2))


@pytest.mark.parametrize(
    ("saved", "present", "expected"),
    [(0.5, 0.1, 0.5), (abs, 0.1, 0.1), (0.5, abs, abs), (abs, abs, abs), (None, 0.1, 0.1)],
    ids=["numbers", "function there", "function here", "functions", "an older version"],
)
def test_a_learning_rate_that_is_a_number_replaces_a_number(saved, present, expected, tmp_path):
    one = ke.SGD(net.engine(), 0.2 if saved is None else saved)
    with pytest.MonkeyPatch.context() as patch:
        if saved is None:  # states of older versions have no learning rate
            table = {name: number for name, number in one._table.items() if "rate" not in name}
            patch.setattr(ke.SGD, "_table", table)
        one.save(tmp_path / "state")
    other = ke.SGD(net.engine(), present)
    other.load(tmp_path / "state")
    assert other.learning_rate == expected
