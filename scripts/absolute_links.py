"""Replace the relative links of README.md by addresses, for the page of the package index.

Run in a copy that is not committed: ``python -m scripts.absolute_links``.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)")


def absolute(text: str, repository: str) -> str:
    """Return Markdown with links to files of the repository as addresses on its host.

    Links are relative to the root of the repository. Pictures have the address of their bytes,
    other files the address of their page.
    """
    forms = {"!": "raw/main", "": "blob/main"}
    return _LINK.sub(
        lambda link: f"{link[1]}{link[2]}({repository}/{forms[link[1]]}/{link[3]})", text
    )


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    path = ROOT / "README.md"
    path.write_text(
        absolute(path.read_text(encoding="utf-8"), project["urls"]["Homepage"]), encoding="utf-8"
    )
