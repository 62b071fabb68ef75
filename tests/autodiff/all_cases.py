"""The cases of all files ``rule_cases_*.py`` beside this one, and those of differences."""

from importlib import import_module
from pathlib import Path

CASES = tuple(
    case
    for path in sorted(Path(__file__).parent.glob("rule_cases_*.py"))
    for case in import_module(f"tests.autodiff.{path.stem}").CASES
)
# One case rounds float64 to float32, which differences cannot follow.
SMOOTH = [case for case in CASES if str(case) != "Cast-same_type"]
# At factors of zero the rules of products write the first derivative by cases, each constant in
# the zero factor: J v is right there, the second derivative is not.
ONLY_FIRST = {
    "ReduceProd-one_zero", "ReduceProd-two_zeros", "ScatterElements-mul_zeros", "CumProd-zeros",
    "CumProd-zeros_exclusive", "CumProd-zeros_reverse", "CumProd-zeros_exclusive_reverse",
}  # fmt: skip
