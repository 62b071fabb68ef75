"""Code blocks of the pages of the documentation."""

import re
from pathlib import Path
from typing import NamedTuple


class Block(NamedTuple):
    """A fenced block: its language, the options behind the language, and its code."""

    language: str
    options: str
    code: str


def all_blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^```(\w+)( [^\n]*)?\n(.*?)^```", text, re.M | re.S)
    return [Block(*block) for block in found]


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    """Return the blocks in some languages as (language, code), in order."""
    return [(b.language, b.code) for b in all_blocks(page) if b.language in languages]
