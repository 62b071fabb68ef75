"""Notes on large factors: which layers have one, and what it advises."""

from itertools import pairwise

import pytest

import kfac_engine as ke
from kfac_engine.engine.large_factors import large_factor_notes
from tests.models import Net


def layers_of(*sides, **options):
    """Return the layers of a chain of dense layers without biases, from input to output."""
    net, x = Net(), "input"
    for i, (d_in, d_out) in enumerate(pairwise(sides)):
        x = net.op("MatMul", x, net.weight(f"w{i}", d_in, d_out, spread=0.01), to=f"s{i}")
    model = net.model({"input": ["n", sides[0]]}, {x: ["n", sides[-1]]})
    return ke.Engine.from_onnx(model, loss="categorical", **options).layers


GIB = 1 << 30
# First parameters of each note; the sizes of a chain of layers; the peak memory.
CASES = {
    "2048 rows": ([], (2, 2048), None),
    "2049 rows dominate refreshes": ([["w0"]], (2, 2049), None),
    "2300 rows in one layer of two": ([["w0"]], (2300, 10, 100), 10 * GIB),
    "2300 rows in each of four layers": ([], (2, 2300, 2, 2300, 2), 10 * GIB),
    "a third of the memory": ([["w0", "w2"], ["w1", "w3"]], (2, 2300, 2, 2300, 2), 128 << 20),
    "a tenth of the memory": ([], (2, 2300, 2, 2300, 2), 400 << 20),
    "4097 rows": ([["w0", "w2"], ["w1", "w3"]], (2, 4097, 2, 4097, 2), 10 * GIB),
}


@pytest.mark.parametrize(("groups", "sides", "peak"), CASES.values(), ids=CASES)
def test_only_layers_that_dominate_or_are_very_large_have_a_note(groups, sides, peak):
    notes = list(large_factor_notes(layers_of(*sides), peak))
    assert len(notes) == len(groups)
    for note, group in zip(notes, groups, strict=True):
        more = f" and of {len(group) - 1} more layers" if len(group) > 1 else ""
        assert note.startswith(f"each refresh of {group[0]}{more} inverts")


def test_a_note_has_the_shares_of_refreshes_and_of_the_memory():
    layers = layers_of(2300, 1000, 10)
    (note,) = large_factor_notes(layers, 10 * layers[0].factor_bytes)
    # (2300³ + 1000³) / (2300³ + 2·1000³ + 10³), and 2300³ operations for the large factor.
    assert note == (
        "each refresh of w0 inverts 2300×2300, 12.2 GFLOP; their factors take 93 % of the "
        "operations of all refreshes and 10 % of the peak memory; 'kron_in_diag' for "
        "fully_connected (--approx fully_connected=kron_in_diag) has diagonals instead"
    )


def test_an_engine_has_the_note_without_the_memory():
    net = Net()
    net.op("MatMul", "x", net.weight("w", 2, 2049, spread=0.01), to="y")
    model = net.model({"x": ["n", 2]}, {"y": ["n", 2049]})
    engine = ke.Engine.from_onnx(model, loss="categorical")
    (note,) = (note for note in engine._standing_notes if "inverts" in note)
    assert "2049×2049" in note
    assert "memory" not in note


def test_a_kind_without_another_approximation_is_refreshed_less_often():
    net = Net()
    net.op("Conv", "x", net.weight("w", 2, 2100, 1, spread=0.01), to="y", kernel_shape=[1])
    model = net.model({"x": ["n", 2100, 3]}, {"y": ["n", 2, 3]})
    (note,) = large_factor_notes(ke.Engine.from_onnx(model, loss="normal").layers)
    assert note.endswith("conv1d has no approximation without them, so refresh them less often")
