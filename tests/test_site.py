"""The reference has every public name."""

import re
from pathlib import Path

import kfac_engine as ke

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = [*(ROOT / "docs/reference").glob("*.md")]


def test_reference_has_each_public_name_once():
    text = "".join(page.read_text(encoding="utf-8") for page in REFERENCE)
    names = re.findall(r"^::: kfac_engine\.(\w+)$", text, re.M)
    assert sorted(names) == sorted(set(ke.__all__) - {"__version__"})
