"""Convolutions in groups against each group taken as a convolution of its own."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from scipy.linalg import block_diag

import kfac_engine as ke
from kfac_engine.layers.grouped import grouped_form
from tests.backend.truths import patches as truth_patches
from tests.lifecycle import Block, damped_block, observe, second_moment

DAMPING = 0.3


@dataclass(frozen=True)
class Case:
    """A convolution of ``groups · channels`` channels into ``groups · outputs``."""

    sides: tuple
    kernel: tuple
    groups: int
    channels: int
    outputs: int
    pads: tuple | None = None
    strides: tuple | None = None
    dilations: tuple | None = None
    bias: bool = True
    first: bool = False

    @property
    def padding(self):
        return self.pads or ((0, 0),) * len(self.sides)

    @property
    def steps(self):
        ones = (1,) * len(self.sides)
        return self.strides or ones, self.dilations or ones

    @property
    def filter_shape(self):
        last = (self.channels, self.groups * self.outputs)
        return (*last[::-1], *self.kernel) if self.first else (*self.kernel, *last)

    @property
    def shapes(self):
        return [self.filter_shape] + [(self.groups * self.outputs,)] * self.bias

    @property
    def locations(self):
        spans = zip(self.sides, self.kernel, self.padding, *self.steps, strict=True)
        return tuple((n + sum(pad) - (k - 1) * d - 1) // s + 1 for n, k, pad, s, d in spans)

    def batch(self, n, seed, dtype=np.float64):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(n, self.groups * self.channels, *self.sides)) + 0.3
        ds = rng.normal(size=(n, self.groups * self.outputs, *self.locations))
        if not self.first:
            x, ds = np.moveaxis(x, 1, -1), np.moveaxis(ds, 1, -1)
        return {"x": x.astype(dtype), "ds": ds.astype(dtype)}

    def by_group(self, values):
        """For each group, rows of its inputs and of its gradients, ``(n, t, …)``."""
        x, ds = (values[name].astype(np.float64) for name in ("x", "ds"))
        if not self.first:
            x, ds = np.moveaxis(x, -1, 1), np.moveaxis(ds, -1, 1)
        begins, ends = zip(*self.padding, strict=True)
        for g in range(self.groups):
            own = x[:, g * self.channels : (g + 1) * self.channels]
            made = ds[:, g * self.outputs : (g + 1) * self.outputs]
            rows = truth_patches(own, self.kernel, *self.steps, begins, ends)
            yield rows, made.reshape(*made.shape[:2], -1).swapaxes(1, 2)

    def pack(self, parts):
        """Group by group: the filter's rows for its outputs, the bias below."""
        weight = parts[0]
        if self.first:
            weight = np.moveaxis(weight, (0, 1), (-1, -2))
        rows = weight.reshape(-1, self.groups * self.outputs)
        rows = np.concatenate([rows, *(b.reshape(1, -1) for b in parts[1:])])
        return np.stack(np.split(rows, self.groups, axis=1))


CASES = {
    "2d": Case((4, 5), (2, 3), 2, 2, 3, pads=((1, 0), (1, 1))),
    "2d-strided": Case((5, 4), (2, 2), 3, 1, 2, strides=(2, 1), dilations=(1, 2), bias=False),
    "2d-first": Case((4, 4), (3, 2), 2, 2, 1, pads=((1, 1), (0, 1)), first=True),
    "1d": Case((7,), (3,), 2, 2, 2, strides=(2,)),
    "3d-first": Case((3, 2, 3), (2, 1, 2), 2, 1, 2, first=True, bias=False),
    "one-group": Case((3, 3), (2, 2), 1, 2, 2),
    "depthwise": Case((4, 4), (2, 2), 4, 1, 1, first=True),
}
FORMATS = {1: ("NCW", "OIW"), 2: ("NCHW", "OIHW"), 3: ("NCDHW", "OIDHW")}
PARAMS = {True: ("w", "b"), False: "w"}


def registered(case, approx=None, towers=1):
    collection = ke.LayerCollection(graph={"w": case.filter_shape})
    options = {}
    if case.first:
        names = ("data_format", "weight_format")
        options = dict(zip(names, FORMATS[len(case.sides)], strict=True))
    for tower in range(towers):
        suffix = str(tower) if towers > 1 else ""
        form = grouped_form(
            collection.require_shape("w"),
            case.groups,
            has_bias=case.bias,
            padding=case.padding,
            strides=case.strides,
            dilations=case.dilations,
            **options,
        )
        tensors = f"x{suffix}", f"s{suffix}"
        collection.register("grouped_convolution", PARAMS[case.bias], form, *tensors, approx)
    return collection


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
        damped_squares if linear else partial(damped, case), case.shapes, case.pack,
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
