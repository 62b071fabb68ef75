"""Code blocks of the pages of the documentation."""

import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from kfac_engine.__main__ import main


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


def execute(page: Path, *languages: str) -> dict[str, Any]:
    """Execute blocks of Python and commands of a page in the present folder, in order.

    The result has the names that the blocks define.
    """
    names: dict[str, Any] = {}
    for language, code in blocks(page, *languages):
        if language == "python":
            exec(compile(code, page.name, "exec"), names)
            continue
        for line in code.splitlines():
            prompt, program, *arguments = shlex.split(line)
            assert (prompt, program) == ("$", "kfac-engine")
            assert main(arguments) == 0
    return names
