"""Convolutions in groups against each group taken as a convolution of its own."""

from functools import partial

import numpy as np
import pytest
from scipy.linalg import block_diag

import kfac_engine as ke
from kfac_engine.layers.grouped import grouped_form
from tests.curvature.blocks.convolutions import PARAMS, Convolution
from tests.lifecycle import Block, damped_block, observe, second_moment

DAMPING = 0.3


CASES = {
    "2d": Convolution((4, 5), (2, 3), ((1, 0), (1, 1)), groups=2, outputs=3),
    "2d-strided": Convolution(
        (5, 4), (2, 2), groups=3, channels=1, strides=(2, 1), dilations=(1, 2), bias=False
    ),
    "2d-first": Convolution((4, 4), (3, 2), ((1, 1), (0, 1)), groups=2, outputs=1, first=True),
    "1d": Convolution((7,), (3,), groups=2, strides=(2,)),
    "3d-first": Convolution((3, 2, 3), (2, 1, 2), groups=2, channels=1, first=True, bias=False),
    "one-group": Convolution((3, 3), (2, 2)),
    "depthwise": Convolution((4, 4), (2, 2), groups=4, channels=1, outputs=1, first=True),
}


def registered(case, approx=None, towers=1):
    collection = ke.LayerCollection(graph={"w": case.filter_shape})
    for tower in range(towers):
        suffix = str(tower) if towers > 1 else ""
        form = grouped_form(
            collection.require_shape("w"),
            case.groups,
            has_bias=case.bias,
            padding=case.pads,
            strides=case.strides,
            dilations=case.dilations,
            **case.formats,
        )
        tensors = f"x{suffix}", f"s{suffix}"
        collection.register("grouped_convolution", PARAMS[case.bias], form, *tensors, approx)
    return collection


def packed(case, parts):
    """The packed matrices of the groups."""
    return np.stack(np.split(case.pack(parts), case.groups, axis=1))


def factors(case, values):
    """``A`` and ``G`` of each group, and the number of locations."""
    pairs = []
    for a, ds in case.by_group(values):
        A = second_moment(a.reshape(-1, a.shape[-1]), case.bias)
        pairs.append((A, second_moment(ds.reshape(-1, ds.shape[-1]))))
    return pairs, int(np.prod(case.locations))


def kronecker(case, values):
    pairs, t = factors(case, values)
    return block_diag(*(t * np.kron(A, G) for A, G in pairs))


def damped(case, values, damping):
    pairs, t = factors(case, values)
    return block_diag(*(damped_block(A, G, damping, t) for A, G in pairs))


def squares(case, values):
    """The mean squared per-example gradient of each group, in packed order."""
    found = []
    for a, ds in case.by_group(values):
        if case.bias:
            a = np.concatenate([a, np.ones((*a.shape[:2], 1))], axis=2)
        found.append(sum((x.T @ d) ** 2 for x, d in zip(a, ds, strict=True)) / len(a))
    return np.diag(np.array(found).ravel())


def block_of(case, approx, truth):
    def damped_squares(values, damping):
        D = squares(case, values)
        return D + damping * np.eye(len(D))

    def sides(values):
        return [block_diag(*side) for side in zip(*factors(case, values)[0], strict=True)]

    linear = {} if approx == "kron" else {"linear": True}
    kron = {"locations": int(np.prod(case.locations)), "sides": sides} if not linear else {}
    return Block(
        case.batch, partial(registered, case, approx), partial(truth, case),
        damped_squares if linear else partial(damped, case), case.shapes,
        partial(packed, case),
        **linear, **kron,
    )  # fmt: skip


BLOCKS = {
    f"{name} {approx}": block_of(case, approx, truth)
    for name, case in CASES.items()
    for approx, truth in (("kron", kronecker), ("diagonal", squares))
}


def test_damping_is_split_in_each_group_or_evenly():
    case = CASES["2d"]
    values = case.batch(4, 8)
    values["x"][..., :2] *= 10  # the first group's inputs are larger
    collection = registered(case)
    block = observe(collection, [["ds"]], [values], damping=DAMPING)
    a, g = block.split_damping()
    pairs, t = factors(case, values)
    for level, other, (A, G) in zip(a, g, pairs, strict=True):
        pi = np.sqrt(np.trace(A) / len(A) / (np.trace(G) / len(G)))
        assert level == pytest.approx(np.sqrt(DAMPING / t) * pi)
        assert level * other == pytest.approx(DAMPING / t)
    assert a[0] > 2 * a[1]


def grouped(collection, groups, approx=None):
    form = grouped_form(collection.require_shape("w"), groups, has_bias=False, padding="VALID")
    collection.register("grouped_convolution", "w", form, "x", "s", approx)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 4}, "6 outputs cannot be divided into 4 groups"),
        ({"groups": 0}, "cannot be divided into 0 groups"),
        ({"groups": 2, "approx": "kron_sua"}, "Bad value 'kron_sua'"),
    ],
)
def test_what_does_not_fit_is_refused_at_registration(options, message):
    collection = ke.LayerCollection(graph={"w": (2, 2, 3, 6)})
    with pytest.raises(ValueError, match=message):
        grouped(collection, **options)
    assert collection.get_blocks() == ()


def test_images_with_other_channels_are_refused():
    collection = ke.LayerCollection(graph={"w": (1, 1, 2, 4)})
    grouped(collection, 2)
    values = {"x": np.ones((1, 2, 2, 5)), "ds": np.ones((1, 2, 2, 4))}
    with pytest.raises(ke.ShapeError, match="5 channels cannot fall into 2 groups"):
        observe(collection, [["ds"]], [values])


@pytest.mark.parametrize("shape", [(1, 1, 2, 5), (1, 1, 3, 4), (1, 2, 4)])
def test_vectors_of_another_shape_are_refused(shape):
    collection = ke.LayerCollection(graph={"w": (1, 1, 2, 4)})
    grouped(collection, 2)
    values = {"x": np.ones((1, 2, 2, 4)), "ds": np.ones((1, 2, 2, 4))}
    block = observe(collection, [["ds"]], [values])
    with pytest.raises(ke.ShapeError):
        block.multiply(np.ones(shape))
