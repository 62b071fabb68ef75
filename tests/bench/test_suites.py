"""Suites without contenders: growth, memory, stages; and the networks whose steps are timed."""

import pytest
from rich.console import Console

from kfac_engine.bench import scaling
from kfac_engine.bench.scaling import fitted
from kfac_engine.bench.stages import take_apart
from kfac_engine.bench.step_networks import NETWORKS, classifier

PARAMETERS = {
    "mlp": 785 * 1024 + 1025 * 512 + 513 * 256 + 257 * 10,
    # The published network's 269,722 with 688 biases in place of 1,376 parameters of
    # normalizations, and two shortcuts that are convolutions.
    "resnet20": 269_722 - 688 + (16 * 32 + 32) + (32 * 64 + 64),
    "transformer": 256 * 256
    + 4 * (4 * 257 * 256 + 257 * 1024 + 1025 * 256 + 4 * 256)
    + 2 * 256
    + 257 * 256,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_network_has_the_parameters_it_is_known_for(name):
    assert sum(w.size for w in NETWORKS[name]().weights.values()) == PARAMETERS[name]


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


def test_stages_of_a_step_are_those_of_the_engine(monkeypatch):
    monkeypatch.setattr(
        "kfac_engine.bench.stages.NETWORKS", {"tiny": lambda: classifier((6, 5, 3))}
    )
    rows = take_apart("tiny", 8, rounds=2)
    names = ["forward", "backward", "statistics", "inverses", "precondition"]
    assert [row.stage.name for row in rows] == names
    assert all(row.stage.seconds > 0 for row in rows)
