"""Writes docs/approximations.md from the table of approximations.

Run from the repository root after changing `kfac_engine/curvature/approximations.py`:
``python -m scripts.list_approximations``; a test compares the page with the table.
"""

from pathlib import Path

from kfac_engine.curvature.approximations import KINDS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "approximations.md"

HEAD = """# Approximations

What each kind of layer can be given as its block of the Fisher matrix: by `approx=` of the
registration that is named after the kind, by `approximations={kind: name}` of the engine, or by
`--approx KIND=NAME`. Written by `scripts/list_approximations.py` from the table in the code.

`A` second moment of inputs, `G` of output gradients, both means over uses, examples and positions;
`t` positions, `u` uses, `d` a lag between uses; `C`, `m` covariance and mean of a pixel's channels;
`g` the gradient of an example (of the batch in blocks without an engine); `U`, `s`
eigenbasis of the factors and variances in it. Damping and powers: [conventions](conventions.md).

| kind of layer | approximation | block | source |
|---|---|---|---|
"""


def page() -> str:
    """The page, as it should be."""
    rows = []
    for kind, found in KINDS.items():
        for name, row in found.approximations.items():
            default = " (default)" if name == found.default else ""
            symbols = row.formula.replace("|", "\\|")
            rows.append(f"| `{kind}` | `{name}`{default} | {symbols} | {row.source} |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
