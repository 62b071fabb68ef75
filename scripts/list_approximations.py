"""Writes docs/approximations.md from the table of approximations.

Run from the repository root after changing `kfac_engine/curvature/approximations.py`:
``python -m scripts.list_approximations``; a test compares the page with the table.
"""

from pathlib import Path

from kfac_engine.curvature.approximations import KINDS, LARGEST_FULL_SIDE, NOTATION
from kfac_engine.curvature.blocks.kronecker import LARGEST_DIVIDED, LARGEST_OF_DATA
from kfac_engine.curvature.factors.divided import LARGEST_BLOCK, LARGEST_PART

PAGE = Path(__file__).resolve().parent.parent / "docs" / "approximations.md"

HEAD = """# Approximations

This page lists the approximations of the Fisher block for each kind of layer. Select an
approximation by `approx=` of the registration that is named after the kind, by
`approximations={{kind: name}}` of the engine, or by `--approx KIND=NAME`.

`scripts/list_approximations.py` writes this page from the table in the code.

Formulas use these symbols, which `inspect` explains, too:

{symbols}

[Conventions](conventions.md) defines damping and powers.

## Large layers

An inverse takes time cubic in the rows of a factor, and a product with a gradient linear time. An
engine therefore chooses the default approximation by the size of a layer:

- A layer whose factors have at most {largest:,} rows (3 × 3 pixels of 64 channels and a bias) has
  the default of its kind. The input factor of a layer that reads an input of the model may have
  {of_data:,} rows, and so may a tied table.
- A layer with a larger factor has the default of large layers. With `blocks`, the size of each
  factor determines its form: a matrix of at most {largest:,} rows, or {of_data:,} features of an
  input of the model, is dense. A matrix of at most {divided:,} rows is divided into equal blocks on
  its diagonal, of at most {part:,} rows each. A matrix with more rows, such as the outputs of a
  vocabulary, is a diagonal.
- Scales and shifts are large if they have more than {scales} entries.

`inspect` and `engine.layers` show the approximation of each layer. `approximations={{kind: name}}`
holds for layers of all sizes: `{{"fully_connected": "kron"}}` has dense factors whatever their
size. A `LayerCollection` without an engine has the default of the kind for all sizes.

## Table

| kind of layer | approximation | block | source |
|---|---|---|---|
"""


def page() -> str:
    """Return the page for the current table."""
    rows = []
    for kind, family in KINDS.items():
        for name, row in family.approximations.items():
            defaults = {family.large: " (default of large layers)", family.default: " (default)"}
            default = defaults.get(name, "")
            symbols = row.formula.replace("|", "\\|")
            rows.append(f"| `{kind}` | `{name}`{default} | {symbols} | {row.source} |")
    symbols = "\n".join(f"- `{symbol}`: {meaning}" for symbol, meaning in NOTATION.items())
    head = HEAD.format(
        symbols=symbols,
        largest=LARGEST_BLOCK,
        of_data=LARGEST_OF_DATA,
        part=LARGEST_PART,
        divided=LARGEST_DIVIDED,
        scales=LARGEST_FULL_SIDE,
    )
    return head + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
