"""The symbols of formulas of blocks have meanings."""

import re

import pytest

from kfac_engine.curvature.approximations import KINDS, NOTATION, explained

FORMULAS = sorted({row.formula for kind in KINDS.values() for row in kind.approximations.values()})
# Operators that every reader of a formula knows.
_KNOWN = r"[·+−|(),\s]"


@pytest.mark.parametrize("formula", FORMULAS)
def test_every_symbol_of_a_formula_is_explained(formula):
    rest = formula
    for symbol in sorted(explained([formula]), key=len, reverse=True):
        assert symbol in formula
        rest = rest.replace(symbol, " ")
    # Transposes, powers, and the indices of a group or a lag.
    rest = re.sub(r"[ᵀ²]|_[gd]\b|(?<![a-z])d(?![a-z])", " ", rest)
    assert re.sub(_KNOWN, "", rest) == ""


def test_every_symbol_belongs_to_a_formula():
    assert set(explained(FORMULAS)) == set(NOTATION)


@pytest.mark.parametrize(
    ("formula", "symbols"),
    [
        ("t · A ⊗ G", {"t", "A", "⊗", "G"}),
        ("⊕ t · A_g ⊗ G_g", {"⊕", "t", "A", "⊗", "G"}),
        ("U diag(s) Uᵀ", {"U", "diag", "s"}),
        ("diag(g²)", {"diag", "g"}),
        ("A(mean a) ⊗ G(Σ ds)", {"A", "mean a", "⊗", "G", "Σ ds"}),
    ],
)
def test_parts_of_other_symbols_are_not_explained(formula, symbols):
    assert set(explained([formula])) == symbols
