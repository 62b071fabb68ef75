"""Code blocks of the pages of the documentation."""

import re
import shlex
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from kfac_engine.__main__ import main


class Block(NamedTuple):
    """A fenced block: its language, the options behind the language, and its code."""

    language: str
    options: str
    code: str


def all_blocks(page: Path, section: str = "") -> list[Block]:
    """Return the blocks of a page, or of a section, in order."""
    text = page.read_text(encoding="utf-8")
    if section:
        text = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)[1]
    found = re.findall(r"^```(\w+)( [^\n]*)?\n(.*?)^```", text, re.M | re.S)
    return [Block(*block) for block in found]


def blocks(page: Path, *languages: str, section: str = "") -> list[tuple[str, str]]:
    """Return the blocks in some languages as (language, code), in order."""
    return [(b.language, b.code) for b in all_blocks(page, section) if b.language in languages]


def execute(
    page: Path,
    *languages: str,
    section: str = "",
    shown: Callable[[str, str], object] | None = None,
) -> dict[str, Any]:
    """Execute blocks of Python and commands of a page in the present folder, in order.

    ``shown`` compares what a block prints with the block of text behind it. The result has the
    names that the blocks define.
    """
    names: dict[str, Any] = {}
    printed = StringIO()
    for language, code in blocks(page, *languages, *(["text"] if shown else []), section=section):
        if language == "text":
            shown(printed.getvalue(), code)
            continue
        with redirect_stdout(printed := StringIO()) if shown else nullcontext():
            if language == "python":
                exec(compile(code, page.name, "exec"), names)
                continue
            for line in code.splitlines():
                prompt, program, *arguments = shlex.split(line)
                assert (prompt, program) == ("$", "kfac-engine")
                assert main(arguments) == 0
    return names
