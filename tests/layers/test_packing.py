"""Weights and biases as one matrix: every entry followed by hand."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.layers.grouped import GroupedPacking, StackedDensePacking
from kfac_engine.layers.packing import Packing

SIDES = {"I": 3, "O": 4, "H": 2, "W": 5, "D": 2}
FORMATS = ["IO", "OI", "WIO", "OIW", "HWIO", "OIHW", "DHWIO", "OIDHW"]


def weight_of(weight_format, dtype=np.float64):
    """A weight whose every entry is different."""
    shape = tuple(SIDES[axis] for axis in weight_format)
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


def entry(weight_format, weight, where):
    """The entry of a weight at a place given axis by axis."""
    return weight[tuple(where[axis] for axis in weight_format)]


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("has_bias", [False, True], ids=["weight", "weight and bias"])
def test_packed_rows_are_taps_inputs_and_bias(weight_format, has_bias):
    packing = Packing(weight_format, has_bias)
    weight, bias = weight_of(weight_format), -1.0 - np.arange(4.0)
    matrix = packing.pack((weight, bias) if has_bias else weight, "w", np)
    spatial = [axis for axis in "DHW" if axis in weight_format]
    row = 0
    for place in np.ndindex(*(SIDES[axis] for axis in [*spatial, "I"])):
        for o in range(4):
            where = dict(zip([*spatial, "I"], place, strict=True)) | {"O": o}
            assert matrix[row, o] == entry(weight_format, weight, where)
        row += 1
    if has_bias:
        np.testing.assert_array_equal(matrix[row], bias)
    assert matrix.shape == (row + has_bias, 4) == packing.matrix_shape(weight.shape)
    assert packing.kernel(weight.shape) == tuple(SIDES[axis] for axis in spatial)


@pytest.mark.parametrize("weight_format", ["IO", "OI", "OIHW"])
def test_parts_of_a_weight_without_taps_are_views(weight_format):
    shape = tuple({"I": 3, "O": 4}.get(axis, 1) for axis in weight_format)
    weight = np.arange(12.0).reshape(shape)
    (part,) = Packing(weight_format, has_bias=False).parts(weight, "w")
    assert np.shares_memory(part, weight)


@pytest.mark.parametrize("shape", [(4,), (4, 1, 1), (1, 4)])
def test_unpacked_bias_keeps_axes_of_size_one(shape):
    packing, vector = Packing("OIHW", True), (weight_of("OIHW"), np.arange(4.0).reshape(shape))
    back = packing.unpack(packing.pack(vector, "w", np), vector)
    assert back[1].shape == shape
    np.testing.assert_array_equal(back[1], vector[1])


@pytest.mark.parametrize(
    ("weight_format", "has_bias", "vector", "error", "says"),
    [
        ("IO", True, np.ones((3, 4)), ke.InputError, r"needs 2 array\(s\), got 1"),
        ("IO", False, (np.ones((3, 4)), np.ones(4)), ke.InputError, r"needs 1 array\(s\), got 2"),
        (
            "HWIO", False, np.ones((3, 4)), ke.ShapeError,
            r"shape \(3, 4\), but its format HWIO has 4 axes"),
        ("IO", True, (np.ones((3, 4)), np.ones(3)), ke.ShapeError, r"bias of .* shape \(3,\)"),
    ],
    ids=["no bias", "a bias too many", "rank", "bias"],
)  # fmt: skip
def test_pack_rejects_arrays_of_wrong_shape(weight_format, has_bias, vector, error, says):
    with pytest.raises(error, match=says):
        Packing(weight_format, has_bias).pack(vector, "w", np)


def test_unknown_format_error_lists_known_formats():
    with pytest.raises(ke.InputError, match=r"weight_format must be one of IO, OI, .*; got 'OHWI'"):
        Packing("OHWI", False)


@pytest.mark.parametrize("weight_format", [*FORMATS, "WOI", "IOW", "HWOI", "IOHW", "IODHW"])
def test_the_matrix_of_a_weight_has_a_column_for_each_output(weight_format):
    packing, weight = Packing(weight_format, has_bias=True), weight_of(weight_format, np.float32)
    matrices = packing.matrices(weight, np)
    spatial = [axis for axis in "DHW" if axis in weight_format]
    assert packing.kernel(weight.shape) == tuple(SIDES[axis] for axis in spatial)
    places = list(np.ndindex(*(SIDES[axis] for axis in [*spatial, "I"])))
    assert matrices.shape == (1, len(places), 4)
    for row, place in enumerate(places):
        for o in range(4):
            where = dict(zip([*spatial, "I"], place, strict=True)) | {"O": o}
            assert matrices[0, row, o] == entry(weight_format, weight, where)
    back = packing.from_matrices(matrices, weight)
    np.testing.assert_array_equal(back, weight)
    assert back.dtype == weight.dtype
    assert back.flags.c_contiguous


def test_stacked_weights_have_a_matrix_each():
    filters = np.arange(48.0).reshape(6, 2, 4)  # (outputs, channels of a group, taps)
    depthwise = np.arange(24.0).reshape(2, 2, 3, 2)  # (taps, taps, channels, outputs of a channel)
    experts = np.arange(24.0).reshape(2, 3, 4)
    cases = [
        (
            GroupedPacking("OIW", True, 3),
            filters,
            lambda g, r, c: filters[2 * g + c, r % 2, r // 2],
        ),
        (
            GroupedPacking("HWIO", False, 3, True),
            depthwise,
            lambda g, r, c: depthwise[r // 2, r % 2, g, c],
        ),
        (StackedDensePacking("IO", True), experts, lambda g, r, c: experts[g, r, c]),
    ]
    for (packing, weight, at), shape in zip(cases, [(3, 8, 2), (3, 4, 2), (2, 3, 4)], strict=True):
        matrices = packing.matrices(weight, np)
        assert matrices.shape == shape
        assert all(matrices[place] == at(*place) for place in np.ndindex(shape))
        np.testing.assert_array_equal(packing.from_matrices(matrices, weight), weight)
