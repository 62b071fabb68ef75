"""Notes on large factors: which layers have one, and what it advises."""

from itertools import pairwise

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.engine.report import large_factor_notes
from tests.models import Net

# By default, wide layers have blocks.
DENSE = {"approximations": {"fully_connected": "kron", "scale_and_shift": "full"}}


def chain(*sides):
    """Return a chain of dense layers without biases, from input to output."""
    net, x = Net(), "input"
    for i, (d_in, d_out) in enumerate(pairwise(sides)):
        x = net.op("MatMul", x, net.weight(f"w{i}", d_in, d_out, spread=0.01), to=f"s{i}")
    return net.model({"input": ["n", sides[0]]}, {x: ["n", sides[-1]]})


def layers_of(*sides):
    return ke.Engine.from_onnx(chain(*sides), loss="categorical", **DENSE).layers


GIB = 1 << 30
# First parameters of each note; the sizes of a chain of layers; the peak memory.
CASES = {
    "2048 rows": ([], (2, 2048), None),
    "2049 rows dominate refreshes": ([["w0"]], (2, 2049), None),
    "2300 rows in one layer of two": ([["w0"]], (2300, 10, 100), 10 * GIB),
    "2300 rows in each of four layers": ([], (2, 2300, 2, 2300, 2), 10 * GIB),
    "a third of the memory": ([["w0", "w1", "w2", "w3"]], (2, 2300, 2, 2300, 2), 128 << 20),
    "a tenth of the memory": ([], (2, 2300, 2, 2300, 2), 400 << 20),
    "4097 rows": ([["w0", "w1", "w2", "w3"]], (2, 4097, 2, 4097, 2), 10 * GIB),
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
        "operations of all refreshes and 10 % of the peak memory; 'kron_blocks' "
        "(--approx fully_connected=kron_blocks) has smaller ones"
    )


def test_an_engine_has_the_note_without_the_memory():
    net = Net()
    net.op("MatMul", "x", net.weight("w", 2, 2049, spread=0.01), to="y")
    model = net.model({"x": ["n", 2]}, {"y": ["n", 2049]})
    engine = ke.Engine.from_onnx(model, loss="categorical", **DENSE)
    (note,) = (note for note in engine._standing_notes if "inverts" in note)
    assert "2049×2049" in note
    assert "memory" not in note


def test_a_kind_without_another_approximation_is_refreshed_less_often():
    net = Net()
    net.op("Conv", "x", net.weight("w", 4, 2100, 1, spread=0.01), to="y", kernel_shape=[1], group=2)
    model = net.model({"x": ["n", 4200, 3]}, {"y": ["n", 4, 3]})
    (note,) = large_factor_notes(ke.Engine.from_onnx(model, loss="normal").layers)
    assert note.endswith(
        "grouped_convolution has no approximation without them, so refresh them less often"
    )


# -- defaults --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sides", "approximation", "shapes"),
    [
        ((2, 577), "kron", ((2, 2), (577, 577))),
        ((2, 578), "kron_blocks", ((2, 2), (2, 289, 289))),
        ((2, 577, 3), "kron", ((577, 577), (3, 3))),
        ((2, 578, 3), "kron_blocks", ((2, 289, 289), (3, 3))),
        # Features of the data
        ((1025, 2), "kron", ((1025, 1025), (2, 2))),
        ((1025, 578), "kron_blocks", ((1025, 1025), (2, 289, 289))),
        ((4608, 2), "kron_blocks", ((9, 512, 512), (2, 2))),
        ((2, 8192), "kron_blocks", ((2, 2), (16, 512, 512))),
        ((2, 8193), "kron_blocks", ((2, 2), (8193,))),
    ],
)
def test_the_size_of_a_layer_decides_its_default(sides, approximation, shapes):
    model = chain(*sides)
    layer = ke.Engine.from_onnx(model, loss="categorical").layers[-1]
    assert layer.approximation == approximation
    assert layer.factor_shapes == shapes
    assert not list(large_factor_notes([layer]))
    # A choice of the user holds for all sizes.
    layer = ke.Engine.from_onnx(model, loss="categorical", **DENSE).layers[-1]
    assert layer.approximation == "kron"


def test_a_collection_without_an_engine_has_one_default_for_all_sizes():
    collection = ke.LayerCollection({"w": (2, 5000)})
    collection.register_fully_connected("w", "x", "s")
    assert collection.approximation_of("w") == "kron"


def test_a_measured_structure_has_no_blocks():
    """A is of rank 1, and G of the rank of three examples; each of two blocks would have it."""
    data = np.ones((3, 2), np.float32), np.array([0, 700, 1025])
    curvature = ke.curvature(chain(2, 1026), data, loss="categorical", fisher="empirical")
    eigenvalues = curvature.blocks[0].spectrum.eigenvalues
    assert (eigenvalues > 1e-4 * eigenvalues.max()).sum() == 3
