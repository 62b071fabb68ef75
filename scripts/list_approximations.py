"""Writes docs/approximations.md from the table of approximations.

Run from the repository root after changing `kfac_engine/curvature/approximations.py`:
``python -m scripts.list_approximations``; a test compares the page with the table.
"""

from pathlib import Path

from kfac_engine.curvature.approximations import KINDS, NOTATION

PAGE = Path(__file__).resolve().parent.parent / "docs" / "approximations.md"

HEAD = """# Approximations

This page lists the approximations of the Fisher block for each kind of layer. Select an
approximation by `approx=` of the registration that is named after the kind, by
`approximations={kind: name}` of the engine, or by `--approx KIND=NAME`.

`scripts/list_approximations.py` writes this page from the table in the code.

Formulas use these symbols, which `inspect` explains, too:

{symbols}

[Conventions](conventions.md) defines damping and powers.

| kind of layer | approximation | block | source |
|---|---|---|---|
"""


def page() -> str:
    """Return the page for the current table."""
    rows = []
    for kind, family in KINDS.items():
        for name, row in family.approximations.items():
            default = " (default)" if name == family.default else ""
            symbols = row.formula.replace("|", "\\|")
            rows.append(f"| `{kind}` | `{name}`{default} | {symbols} | {row.source} |")
    symbols = "\n".join(f"- `{symbol}`: {meaning}" for symbol, meaning in NOTATION.items())
    return HEAD.replace("{symbols}", symbols) + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
