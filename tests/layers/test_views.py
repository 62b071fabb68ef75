"""How tensors become rows: counted and gathered one by one."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.backend.protocol import Accumulation
from kfac_engine.backend.window import Window
from kfac_engine.layers.layer_forms import embedding_form
from kfac_engine.layers.views import RowView, patch_view
from tests.backend.truths import patches

EXACT = 1e-12  # float64, sums of a hundred products of size one
BACKEND = NumpyBackend()


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def moment(view, x, homogeneous=False):
    d = view.width(x.shape) + homogeneous
    out = np.full((d, d), np.nan)
    view.second_moment(x, out, BACKEND, Accumulation(homogeneous))
    BACKEND.mirror(out)
    return out


# -- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("view", "shape", "says"),
    [
        (RowView(), (4,), "at least 2 axes"),
        (RowView(1, rank=4), (4, 3), "4 axes"),
        (RowView(-2), (3, 4), "axis 0 is the batch"),
        (RowView(0), (3, 4), "axis 0 is the batch"),
        (RowView(2), (3, 4), "feature axis 2 does not exist"),
    ],
)
def test_tensor_without_batch_and_features_raises_error(view, shape, says):
    for read in (
        lambda: view.width(shape),
        lambda: view.count(shape),
        lambda: view.rows(np.ones(shape), BACKEND),
        lambda: moment(view, np.ones(shape)),
    ):
        with pytest.raises(ke.ShapeError, match=says):
            read()


# -- patches ---------------------------------------------------------------------------------------

CASES = {
    # kernel, strides, dilations, padding, sides, begins, ends: the last two by hand
    "valid": ((2, 3), (1, 1), (1, 1), "VALID", (4, 5), (0, 0), (0, 0)),
    "same": ((2, 3), (1, 1), (1, 1), "SAME", (4, 5), (0, 1), (1, 1)),
    "same lower": ((2, 3), (1, 1), (1, 1), "SAME_LOWER", (4, 5), (1, 1), (0, 1)),
    # ceil(5/2) = 3 outputs need (3 - 1)·2 + 3 = 7 pixels: two more; ceil(6/4) = 2 need 4 + 2 = 6.
    "same strided": ((3, 2), (2, 4), (1, 1), "SAME", (5, 6), (1, 0), (1, 0)),
    # Fewer pixels needed than there are: nothing is cut off, (2 - 1)·3 + 1 = 4 of 5.
    "same sparse": ((1, 1), (3, 3), (1, 1), "SAME", (5, 6), (0, 0), (0, 0)),
    # Taps 2 apart reach over 3 pixels: two more.
    "same dilated": ((2, 2), (1, 1), (2, 3), "SAME", (4, 5), (1, 1), (1, 2)),
    "explicit": ((2, 2), (2, 1), (1, 2), ((1, 0), (0, 3)), (4, 5), (1, 0), (0, 3)),
    "crop": ((2, 2), (1, 1), (1, 1), ((-1, 0), (0, -2)), (4, 5), (-1, 0), (0, -2)),
    "line": ((3,), (2,), (2,), "SAME", (7,), (2,), (2,)),
    "volume": ((2, 1, 2), (1, 2, 1), (1, 1, 1), "SAME", (3, 4, 2), (0, 0, 0), (1, 0, 1)),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
either_layout = pytest.mark.parametrize("first", [False, True], ids=["last", "first"])


def layout(x, first):
    """Images with channels first, as they are or with channels last."""
    return x if first else np.moveaxis(x, 1, -1)


@every_case
@either_layout
def test_patch_view_follows_padding(case, first):
    kernel, strides, dilations, padding, sides, begins, ends = case
    x = draw(2, 3, *sides)
    view = patch_view(kernel, strides, dilations, padding, channels_first=first)
    window = Window(kernel, strides, dilations, begins, ends)
    assert view.window.resolved(sides) == window
    expected = patches(x, kernel, strides, dilations, begins, ends)
    images = layout(x, first)
    np.testing.assert_array_equal(view.rows(images, BACKEND), expected)
    assert view.count(images.shape) == expected.shape[0] * expected.shape[1]
    assert view.width(images.shape) == expected.shape[2]
    assert view.rank == len(sides) + 2
    flat = expected.reshape(-1, expected.shape[2])
    flat = np.concatenate([flat, np.ones((len(flat), 1))], axis=1)
    found = moment(view, images, homogeneous=True)
    np.testing.assert_allclose(found, flat.T @ flat, atol=EXACT)


@pytest.mark.parametrize("side", range(1, 9))
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_same_padding_has_output_per_started_stride(side, stride):
    view = patch_view((3,), (stride,), (1,), "SAME", channels_first=True)
    assert view.count((1, 1, side)) == -(-side // stride)


def test_patches_are_independent_of_strides():
    view = patch_view((2, 2), (1, 1), (1, 1), "SAME", channels_first=False)
    x = draw(3, 8, 10, 4)[:, ::2, ::-2, 1:3]
    np.testing.assert_array_equal(view.rows(x, BACKEND), view.rows(x.copy(), BACKEND))


@pytest.mark.parametrize(
    "options",
    [{"strides": (1,)}, {"dilations": (1, 1, 1)}, {"padding": ((0, 0),)}, {"padding": "FULL"}],
    ids=["strides", "dilations", "pads", "name"],
)
def test_inconsistent_geometry_raises_error(options):
    good = {"strides": (1, 1), "dilations": (1, 1), "padding": "SAME"}
    with pytest.raises(ke.InputError, match="padding"):
        patch_view((2, 2), **(good | options), channels_first=True)


@pytest.mark.parametrize(
    ("shape", "says"), [((2, 3, 5), "2 spatial axes"), ((2, 3, 1, 5), "smaller than the window")]
)
def test_images_that_do_not_fit_filter_raise_error(shape, says):
    view = patch_view((2, 2), (1, 1), (1, 1), "VALID", channels_first=True)
    with pytest.raises(ke.ShapeError, match=says):
        view.count(shape)
    with pytest.raises(ke.ShapeError, match=says):
        view.rows(np.ones(shape), BACKEND)


def test_token_ids_of_example_are_one_row_by_default():
    assert embedding_form(5).input_view.count((3, 4)) == 3
    assert embedding_form(5, positions=True).input_view.count((3, 4)) == 12


@pytest.mark.parametrize(
    ("rank", "shape", "needed"),
    [(2, (3,), r"\(n, ids\)"), (2, (3, 4, 2), r"\(n, ids\)"), (1, (3, 4), r"\(n,\)")],
)
def test_token_ids_of_other_rank_raise_error(rank, shape, needed):
    with pytest.raises(ke.ShapeError, match=f"need shape .*{needed}"):
        embedding_form(5, rank=rank).input_view.width(shape)
    assert embedding_form(5, rank=rank, positions=True).input_view.width(shape) == 5
