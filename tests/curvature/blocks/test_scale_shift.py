"""Scale-and-shift blocks against per-example gradients written out entry by entry."""

from functools import partial
from itertools import product

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.layers.layer_forms import BroadcastShape, ScaleShiftForm
from tests.lifecycle import Block, observe

EXACT = 1e-12  # float64 sums of some dozen terms of size one
SINGLE = 1e-4  # float32, relative to the largest entry of an inverse of condition about ten
DAMPING = 0.2

# Shapes of the data, the scale and the shift (None: no shift), and the feature axis.
CASES = {
    "features": ((4,), (4,), (4,), -1),
    "positions": ((3, 4), (4,), (4,), -1),
    "no-shift": ((3, 4), (4,), None, -1),
    "scalar-shift": ((3, 4), (4,), (), -1),
    "per-position": ((2, 3), (1, 2, 3), (3,), -1),
    "channels-first": ((3, 2, 2), (3,), (3,), 1),
    "channels-first-keepdims": ((3, 2, 2), (3, 1, 1), (1, 3, 1, 1), -1),
    "one-axis": ((2, 3, 2), (3, 1), (2,), -1),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_approximation = pytest.mark.parametrize("approx", ["full", "diagonal"])


def shift_by(shape, **axes):
    return ScaleShiftForm(None, BroadcastShape(shape, **axes))


def batch(data, n, seed, dtype=np.float64):
    rng = np.random.default_rng(seed)
    x, ds = rng.normal(size=(2, n, *data))
    return {"x": (x + 0.5).astype(dtype), "ds": ds.astype(dtype)}


def entry_of(index, shape, feature_axis, rank):
    """The entry of a parameter that the entry ``index`` (batch included) of the data meets."""
    trailing = rank - 1 - feature_axis % rank
    axes = range(rank - trailing - len(shape), rank - trailing)
    return tuple(index[axis] if side > 1 else 0 for axis, side in zip(axes, shape, strict=True))


def per_example_gradients(case, values):
    """``(n, entries of the scale + entries of the shift)``, by a loop over every number."""
    data, scale, shift, feature_axis = case
    x, ds = (values[name].astype(np.float64) for name in ("x", "ds"))
    rows = []
    for n in range(len(ds)):
        sums = [np.zeros(shape) for shape in (scale, shift) if shape is not None]
        for index in product(*map(range, data)):
            whole = (n, *index)
            for part, factor in zip(sums, (x[whole], 1.0), strict=False):
                where = entry_of(whole, part.shape, feature_axis, ds.ndim)
                part[where] += factor * ds[whole]
        rows.append(np.concatenate([part.ravel() for part in sums]))
    return np.array(rows)


def fisher(case, values, approx):
    v = per_example_gradients(case, values)
    F = sum(np.outer(row, row) for row in v) / len(v)
    return F if approx == "full" else np.diag(np.diag(F))


def registered(case, approx, towers=1):
    _, scale, shift, feature_axis = case
    graph = {"g": scale} if shift is None else {"g": scale, "b": shift}
    collection = ke.LayerCollection(graph=graph)
    key = "g" if shift is None else ("g", "b")
    for tower in range(towers):
        suffix = str(tower) if towers > 1 else ""
        collection.register_scale_and_shift(
            key, f"x{suffix}", f"s{suffix}", approx, feature_axis=feature_axis
        )
    return collection


def block_of(case, approx):
    def damped(values, damping):
        F = fisher(case, values, approx)
        return F + damping * np.eye(len(F))

    return Block(
        partial(batch, case[0]), partial(registered, case, approx),
        partial(fisher, case, approx=approx), damped,
        [shape for shape in case[1:3] if shape is not None],
        lambda parts: np.concatenate([part.ravel() for part in parts]),
        exact=EXACT, single=SINGLE, linear=True, root=np.linalg.cholesky,
    )  # fmt: skip


BLOCKS = {
    f"{name} {approx}": block_of(case, approx)
    for name, case in CASES.items()
    for approx in ("full", "diagonal")
}


def test_the_scaled_data_may_be_broadcast_itself():
    values = {"x": np.arange(6.0).reshape(2, 1, 3), "ds": np.ones((2, 4, 3))}
    collection = ke.LayerCollection(graph={"g": (4, 1)})
    collection.register_scale_and_shift("g", "x", "s")
    v = np.array([[3.0] * 4, [12.0] * 4])  # Σ over features of x, the same at every position
    block = observe(collection, [["ds"]], [values])
    np.testing.assert_allclose(block.full_fisher_block(), v.T @ v / 2, rtol=EXACT)


@pytest.mark.parametrize(
    ("block", "factor", "approx"),
    [
        ("ScaleAndShiftFullFB", "ScaleAndShiftFullFactor", "full"),
        ("ScaleAndShiftDiagonalFB", "ScaleAndShiftDiagonalFactor", "diagonal"),
    ],
)
@pytest.mark.parametrize(
    ("case", "dims"),
    [
        ("positions", ((1,),)),
        ("no-shift", ((1,), None, False)),
        ("scalar-shift", ((1,), (1, 2))),
        ("per-position", ((), (1,))),
    ],
)
def test_named_classes_take_the_summed_axes(block, factor, approx, case, dims):
    case = CASES[case]
    values = batch(case[0], 5, 6)
    expected = fisher(case, values, approx)
    collection = ke.LayerCollection()
    made = getattr(ke, block)(collection, *dims)
    made.register_additional_tower("x", "s")
    collection.register_block("g" if case[2] is None else ("g", "b"), made)
    observe(collection, [["ds"]], [values])
    np.testing.assert_allclose(made.full_fisher_block(), expected, atol=EXACT)
    alone = getattr(ke, factor)(["x"], [["ds"]], *dims)
    alone.instantiate_cov_variables()
    alone.make_covariance_update_op(0.9)(values)
    np.testing.assert_allclose(alone.get_cov(), expected, atol=EXACT)


@pytest.mark.parametrize(
    ("scale", "data"),
    [((2, 1, 3), (4, 3)), ((4, 3), (4, 3)), ((2,), (4, 3)), ((3,), (4,))],
    ids=["rank", "batch", "sides", "rank-one"],
)
@pytest.mark.parametrize("declared", ["inputs", "outputs", "nothing"])
def test_shapes_that_cannot_be_broadcast_are_refused(scale, data, declared):
    shapes = {"inputs": {"x": data}, "outputs": {"s": data}, "nothing": {}}[declared]
    collection = ke.LayerCollection(graph={"g": scale} | shapes)
    if shapes:
        with pytest.raises(ValueError, match="a parameter of shape"):
            collection.register_scale_and_shift("g", "x", "s")
        assert collection.get_blocks() == ()
        return
    collection.register_scale_and_shift("g", "x", "s")
    with pytest.raises(ValueError, match="a parameter of shape"):
        observe(collection, [["ds"]], [{"x": np.ones(data), "ds": np.ones(data)}])


def test_other_mistakes_are_named():
    collection = ke.LayerCollection(graph={"g": (3,), "b": (3,), "c": (3,)})
    with pytest.raises(ke.InputError, match="two parameters at most"):
        collection.register_scale_and_shift(("g", "b", "c"), "x", "s")
    with pytest.raises(ValueError, match="Bad value 'kron' for approx"):
        collection.register_scale_and_shift("g", "x", "s", "kron")
    with pytest.raises(ke.InputError, match="shape of 'h' is needed"):
        collection.register_scale_and_shift("h", "x", "s")
    with pytest.raises(ke.InputError, match="axis 0 is the batch"):
        ke.ScaleAndShiftFullFB(collection, (0, 1))
    collection.register_scale_and_shift("g", "x", "s")
    with pytest.raises(ke.ShapeError, match="as many axes"):
        observe(collection, [["ds"]], [{"x": np.ones((2, 3)), "ds": np.ones((2, 4, 3))}])


def test_mistakes_about_uses_and_axes_are_named():
    collection = ke.LayerCollection(graph={"g": (3,), "b": (3,), "s": (4, 3)})
    with pytest.raises(ke.RegistrationError, match=r"has 2 output\(s\) and 1 input\(s\)"):
        collection.register_scale_and_shift("g", "x", ("s0", "s1"))
    with pytest.raises(ke.RegistrationError, match="1 parameter"):
        collection.register("shift", ("g", "b"), shift_by((3,)), (), "s")
    with pytest.raises(ke.ShapeError, match="has no axis 2"):
        collection.register_scale_and_shift("b", "x", "s", batch_axis=2)
    with pytest.raises(ke.ShapeError, match="it must have one entry there"):
        collection.register_scale_and_shift("b", "x", "s", batch_axis=1)
    assert collection.get_blocks() == ()


@every_approximation
def test_a_shift_with_examples_on_a_later_axis_sums_its_uses(approx):
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 4, 5, 3))  # steps, examples, features
    collection = ke.LayerCollection(graph={"b": (3,)})
    form = shift_by((3,), batch_axis=1)
    collection.register("shift", "b", form, (), ("s0", "s1"), approx)
    block = collection.fisher_blocks["b"]
    observe(collection, [[("d0", "d1")]], [{"d0": first, "d1": second}])
    v = np.array(
        [[first[:, n, i].sum() + second[:, n, i].sum() for i in range(3)] for n in range(5)]
    )
    expected = v.T @ v / 5
    expected = expected if approx == "full" else np.diag(np.diag(expected))
    np.testing.assert_allclose(block.full_fisher_block(), expected, atol=EXACT)


def test_towers_of_different_sizes_on_a_later_axis_are_refused():
    collection = ke.LayerCollection(graph={"b": (3,)})
    for tower in ("s", "z"):
        collection.register("shift", "b", shift_by((3,), batch_axis=1), (), tower)
    with pytest.raises(ke.ShapeError, match="differ in their examples"):
        observe(collection, [["d", "e"]], [{"d": np.ones((4, 5, 3)), "e": np.ones((4, 6, 3))}])
