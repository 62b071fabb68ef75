"""Writes docs/reference/modules.md, the index of all modules, from their docstrings.

Run from the repository root after adding, moving or deleting a module, or changing the first line
of its docstring: ``python -m scripts.list_modules``; a test compares the page with the modules.
"""

import ast
from itertools import groupby
from pathlib import Path

from scripts.markdown import table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "modules.md"

HEAD = """# Modules

This page lists all modules with the first sentence of their docstrings, folder by folder.
[ARCHITECTURE.md](../../ARCHITECTURE.md) describes how they work together. `scripts/list_modules.py`
writes this page.
"""


def summary(path: Path) -> str:
    """Return the first line of the docstring of a module."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def page() -> str:
    """Return the page for the current modules."""
    paths = [p for top in ("kfac_engine", "kernels", "bench") for p in (ROOT / top).rglob("*.py")]
    paths += (ROOT / "scripts").glob("*.py")
    parts = [HEAD]
    for folder, modules in groupby(sorted(paths, key=lambda p: (p.parent, p)), lambda p: p.parent):
        about, rows = "", []
        for path in modules:
            if path.name == "__init__.py":
                about = f"{summary(path)}\n\n"
            else:
                rows.append((f"`{path.stem}`", summary(path).replace("|", "\\|")))
        lines = "\n".join(table(("module", "contents"), rows) if rows else ())
        name = folder.relative_to(ROOT).as_posix()
        parts.append(f"## `{name}`\n\n{about}{lines}".rstrip() + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
