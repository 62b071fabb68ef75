"""Suites without contenders: growth, memory, stages; and the networks whose steps are timed."""

import pytest
from rich.console import Console

from kfac_engine.bench import scaling
from kfac_engine.bench.scaling import fitted


def test_an_exponent_is_the_slope_of_logarithms():
    assert fitted([1, 2, 4, 8], [3, 12, 48, 192]) == pytest.approx(2)


def test_points_of_an_axis_share_their_exponents(monkeypatch, capsys):
    shape = lambda n: scaling.Shape(batch=n, width=3, classes=2, layers=1)  # noqa: E731
    monkeypatch.setattr(scaling, "AXES", {"batch": scaling.Axis((2, 4), shape, 0.5, 1)})
    found = {2: scaling.Steps([1.0, 3.0], 8), 4: scaling.Steps([8.0, 8.0], 16)}
    monkeypatch.setattr(scaling, "_in_new_process", lambda shape, *_: found[shape.batch])
    points = scaling.run_scaling(Console(width=160), "scaling", 1, ["batch"], rounds=2)
    assert [point.size for point in points] == [2, 4]
    assert [point.exponent for point in points] == pytest.approx([2, 2])
    assert [point.memory_exponent for point in points] == pytest.approx([1, 1])
    printed = capsys.readouterr().out
    assert "size^2.00, at most 0.5 !" in printed
    assert "size^1.00, at most 1 " in printed


@pytest.mark.parametrize("side", [0, 4], ids=["dense", "convolutions"])
def test_steps_of_a_shape_are_timed(side):
    shape = {"batch": 3, "width": 4, "classes": 2, "layers": 2, "side": side}
    found = scaling.take_steps(shape, threads=1, rounds=2)
    assert len(found.times) == 2
    assert min(found.times) > 0
