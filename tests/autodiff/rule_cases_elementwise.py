"""Cases for arithmetic and activation functions."""

from tests.autodiff.harness import N, case, distinct, flags, k, p, positive, x

_ARITHMETIC = [
    case(op, label, *operands)
    for op, second in (("Add", {}), ("Sub", {}), ("Mul", {}), ("Div", {"draw": positive}))
    for label, operands in {
        "equal_shapes": (x(N, 3), x(N, 3, **second)),
        "vector_on_right": (x(N, 2, 3), p(3, **second)),
        "vector_on_left": (p(3), x(N, 3, **second)),
        "column": (x(N, 2, 3), p(2, 1, **second)),
        "scalar": (x(N, 3), p(**second)),
        "both_stretched": (x(N, 1, 3), x(N, 2, 1, **second)),
        "one_batch_of_one": (x(1, 3), x(N, 3, **second)),
    }.items()
]

_MANY = [
    case("Sum", "one", x(N, 3)),
    case("Sum", "three_stretched", x(N, 2, 3), p(3), p(2, 1)),
    case("Mean", "three_stretched", x(N, 2, 3), p(3), p(2, 1)),
    case("Max", "one", x(N, 3, draw=distinct)),
    case("Max", "two", x(N, 3, draw=distinct), p(3)),
    case("Max", "three_stretched", x(N, 2, 3), p(3), p(2, 1)),
    case("Min", "two", x(N, 3, draw=distinct), p(3)),
    case("Min", "three_stretched", x(N, 2, 3), p(3), p(2, 1)),
    case("Max", "four", x(N, 3, draw=distinct), p(3), p(), x(N, 1)),
    case("Where", "scalars", flags(N, 3), p(), p()),
    case("Where", "branches_wider_than_mask", flags(3), x(N, 1, 3), p(2, 1)),
    case("Where", "equal_shapes", flags(N, 3), x(N, 3), x(N, 3)),
    case("Where", "stretched", flags(N, 1, 3), p(2, 1), x(N, 2, 3)),
    case("Where", "constant_mask", k([True, False, True], "bool"), x(N, 3), p()),
    case("Pow", "squared", x(N, 3), k(2, "float32")),
    case("Pow", "cubed", x(N, 3), k(3, "float32")),
    case("Pow", "to_the_zeroth", x(N, 3), k(0, "float32")),
    case("Pow", "to_the_first", x(N, 3), k(1, "float32")),
    case("Pow", "integer_exponent", x(N, 3), k(3)),
    case("Pow", "root", x(N, 3, draw=positive), k(0.5, "float32")),
    case("Pow", "both", x(N, 3, draw=positive), p(3)),
    case("Pow", "stretched_base", p(1, draw=positive), x(N, 3)),
    case("Pow", "integer_exponents_of_both_signs", x(N, 5), k([-2, -1, 0, 1, 3])),
    case("Pow", "scalar_base", p(draw=positive), x(N, 3)),
]

_UNARY = [
    *(case(op, "normal", x(N, 4)) for op in ("Neg", "Exp", "Erf")),
    *(case(op, "positive", x(N, 4, draw=positive)) for op in ("Log", "Sqrt", "Reciprocal")),
    case("Abs", "off_the_kink", x(N, 4, draw=distinct)),
]

_PIECEWISE = [
    case("Relu", "off_the_kink", x(N, 4, draw=distinct)),
    case("LeakyRelu", "default", x(N, 4, draw=distinct)),
    case("LeakyRelu", "steep", x(N, 4, draw=distinct), alpha=0.3),
    case("LeakyRelu", "negative", x(N, 4, draw=distinct), alpha=-0.3),
    case("PRelu", "per_channel", x(N, 3, 2, draw=distinct), p(3, 1)),
    case("PRelu", "shared", x(N, 3, draw=distinct), p(1)),
    case("PRelu", "scalar", x(N, 3, draw=distinct), p()),
    case("PRelu", "for_each_element", x(N, 2, 3, draw=distinct), p(2, 3)),
    case("PRelu", "for_each_example", x(N, 3, draw=distinct), x(N, 1)),
    case("Clip", "both_bounds", x(N, 6, draw=distinct), p(draw=lambda *_: -0.4), p()),
    case("Clip", "low_only", x(N, 6, draw=distinct), p()),
    case("Clip", "high_only", x(N, 6, draw=distinct), None, p()),
    case("Clip", "no_bound", x(N, 6)),
    case("Clip", "frozen_bounds", x(N, 6, draw=distinct), k(0, "float32"), k(6, "float32")),
    case("Clip", "empty_interval", x(N, 6, draw=distinct), p(draw=lambda *_: 0.51),
         p(draw=lambda *_: -0.51)),
    case("HardSigmoid", "default", x(N, 40, draw=distinct)),
    case("HardSigmoid", "steep", x(N, 8, draw=distinct), alpha=1.5, beta=0.4),
    case("HardSwish", "both_bends", x(N, 80, draw=distinct)),
    case("Softsign", "off_the_kink", x(N, 4, draw=distinct)),
]  # fmt: skip

_SMOOTH = [
    *(case(op, "normal", x(N, 4)) for op in ("Tanh", "Sigmoid", "Softplus")),
    case("Elu", "default", x(N, 4, draw=distinct)),
    case("Elu", "negative_alpha", x(N, 4, draw=distinct), alpha=-0.7),
    case("Selu", "default", x(N, 4, draw=distinct)),
    case("Selu", "own_constants", x(N, 4, draw=distinct), alpha=1.2, gamma=0.8),
    case("Celu", "default", x(N, 4, draw=distinct)),
    case("Celu", "steep", x(N, 4, draw=distinct), alpha=0.4),
    case("Celu", "negative_alpha", x(N, 4, draw=distinct), alpha=-0.7),
    case("Gelu", "default", x(N, 4), opset=20),
    case("Gelu", "tanh", x(N, 4), approximate="tanh", opset=20),
    *(
        case(op, label, x(N, 3, 2), **attributes)
        for op in ("Softmax", "LogSoftmax")
        for label, attributes in {
            "last_axis": {},
            "middle_axis": {"axis": 1},
            "negative_axis": {"axis": -2},
            "over_the_batch": {"axis": 0},
        }.items()
    ),
]

CASES = (*_ARITHMETIC, *_MANY, *_UNARY, *_PIECEWISE, *_SMOOTH)
