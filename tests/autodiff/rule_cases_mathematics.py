"""Cases for Einstein sums, running sums, trigonometry and matrices."""

import numpy as np

from tests.autodiff.harness import N, case, distinct, k, normal, p, positive, x


def _inside(rng: np.random.Generator, sides: tuple[int, ...]) -> np.ndarray:
    return rng.uniform(-0.9, 0.9, sides)


def _over_one(rng: np.random.Generator, sides: tuple[int, ...]) -> np.ndarray:
    return rng.uniform(1.2, 3, sides)


def _off_zero(rng: np.random.Generator, sides: tuple[int, ...]) -> np.ndarray:
    return rng.uniform(0.3, 0.9, sides) * rng.choice([-1, 1], sides)


_EINSUM = [
    case("Einsum", label, *operands, equation=equation)
    for label, equation, operands in (
        ("matrices", "ij,jk->ik", (x(N, 3), p(3, 4))),
        ("dense_with_blanks", " b t i , o i -> b t o ", (x(N, 2, 3), p(4, 3))),
        ("heads", "bhqd,bhkd->bhqk", (x(N, 2, 3, 2), x(N, 2, 2, 2))),
        ("one_weight_for_each", "bgi,gio->bgo", (x(N, 2, 3), p(2, 3, 2))),
        ("transposition", "ij->ji", (x(N, 3),)),
        ("sum", "ijk->j", (x(N, 3, 2),)),
        ("sum_of_all", "ij->", (x(N, 3),)),
        ("inner", "i,i->", (p(3), p(3))),
        ("outer", "i,j->ij", (x(N), p(3))),
        ("scalar", "ij,->ij", (x(N, 3), p())),
        ("bilinear", "bi,oij,bj->bo", (x(N, 2), p(3, 2, 4), x(N, 4))),
        ("four_operands", "ab,bc,cd,d->a", (x(N, 2), p(2, 3), p(3, 2), p(2))),
        ("letter_in_one_operand", "ij,jk->i", (x(N, 3), p(3, 4))),
        ("letters_only_in_one", "ij,k->k", (x(N, 3), p(2))),
        ("letter_dropped_on_both_sides", "ij,ik->i", (x(N, 3), x(N, 2))),
        ("shared_but_kept", "ij,ij->ij", (x(N, 3), x(N, 3))),
        ("dots", "...ij,...jk->...ik", (x(N, 2, 3, 2), x(N, 2, 2, 3))),
        ("dots_in_one", "...i,io->...o", (x(N, 2, 3), p(3, 4))),
        ("dots_stretched", "...i,...i->...i", (x(N, 2, 3), p(1, 2, 3))),
        ("dots_in_front_of_nothing", "...i,i->...", (x(N, 3), p(3))),
        ("dots_at_the_end", "i...,ij->j...", (p(3, 2), p(3, 4))),
        ("no_arrow", "ij,jk", (x(N, 3), p(3, 4))),
        ("no_arrow_out_of_order", "ba,ca", (x(N, 3), p(2, 3))),
        ("no_arrow_dots", "...ij,jk", (x(N, 2, 3), p(3, 2))),
        ("no_arrow_trace", "ii", (p(3, 3),)),
        ("stretched_sum", "ij,jk->ik", (x(N, 1), p(3, 4))),
        ("stretched_batch", "bij,bj->bi", (p(1, 2, 3), x(N, 3))),
        ("sides_of_one", "bij,bjk->bik", (x(N, 1, 3), x(N, 3, 1))),
        ("diagonal", "bii->bi", (x(N, 3, 3),)),
        ("trace", "bii->b", (x(N, 3, 3),)),
        ("diagonal_and_another", "ii,ij->j", (p(3, 3), p(3, 2))),
        ("diagonal_and_dropped", "iij->i", (p(3, 3, 2),)),
        ("dropped_diagonal", "ii,j->j", (p(3, 3), x(N))),
        ("three_times", "iii->i", (p(2, 2, 2),)),
        ("upper_case", "bI,IO->bO", (x(N, 3), p(3, 4))),
    )
]

_ZEROS = np.array([[2.0, 0.5, -1.0, 3.0], [2.0, 0.0, -1.0, 3.0], [2.0, 0.0, 0.0, 3.0]])
_RUNNING = [
    case(op, "_".join((label, *attributes)), x(N, 3, 2), axis, opset=opset, **attributes)
    for op, opset in (("CumSum", 18), ("CumProd", 26))
    for label, axis, attributes in (
        ("middle", k(1), {}),
        ("last", k(-1), {"exclusive": 1}),
        ("batch", k(0, "int32"), {"reverse": 1}),
        ("middle", k(1), {"exclusive": 1, "reverse": 1}),
    )
] + [
    case("CumProd", "_".join(("zeros", *attributes)), x(3, 4, draw=lambda *_: _ZEROS), k(1),
         opset=26, **attributes)
    for attributes in ({}, {"exclusive": 1}, {"reverse": 1}, {"exclusive": 1, "reverse": 1})
]  # fmt: skip

_FUNCTIONS = [
    *(case(op, "normal", x(N, 4)) for op in ("Sin", "Cos", "Tan", "Atan", "Sinh", "Cosh", "Asinh")),
    *(case(op, "inside", x(N, 4, draw=_inside)) for op in ("Asin", "Acos", "Atanh")),
    case("Acosh", "over_one", x(N, 4, draw=_over_one)),
    case("Mod", "both", x(N, 5), p(5, draw=_off_zero), fmod=1),
    case("Mod", "stretched", x(N, 2, 3), p(draw=lambda *_: -0.37), fmod=1),
]

_MATRICES = [
    case("Trilu", "upper", x(N, 3, 4)),
    case("Trilu", "lower_shifted", x(N, 3, 3), k(-1), upper=0),
    case("Det", "matrix", p(3, 3)),
    case("Det", "batch", x(N, 3, 3)),
    case("Det", "two", x(N, 2, 2, 2)),
    case("Det", "one", x(N, 1, 1)),
    case("Det", "side_of_the_batch", x(N, N)),
    case("Det", "singular", x(3, 3, draw=lambda *_: np.arange(9.0).reshape(3, 3))),
    case("Det", "rank_one", x(3, 3, draw=lambda *_: np.ones((3, 3)))),
]

_NORMS = [
    case("LpNormalization", f"{label}_{order}", x(N, 3, 2, draw=draw), p=order, **attributes)
    for order, draw in ((1, distinct), (2, normal))
    for label, attributes in (("last", {}), ("middle", {"axis": 1}), ("batch", {"axis": -3}))
] + [case("LpNormalization", "default", x(N, 3, draw=positive))]

CASES = (*_EINSUM, *_RUNNING, *_FUNCTIONS, *_MATRICES, *_NORMS)
