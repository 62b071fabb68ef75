"""Check that the facts of a release agree: tag, version, changelog, citation and addresses.

Run: ``python -m scripts.check_release v0.1.0 https://github.com/OWNER/NAME``. It needs Python only.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def disagreements(tag: str, repository: str, root: Path = ROOT) -> list[str]:
    """Return a sentence for each fact of a release that disagrees with another fact."""
    package = (root / "kfac_engine/__init__.py").read_text(encoding="utf-8")
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (root / "CITATION.cff").read_text(encoding="utf-8")
    urls = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]

    version = _first(r'^__version__ = "(.+)"$', package)
    dates = re.findall(
        rf"^## \[{re.escape(version)}\] - (\d{{4}}-\d{{2}}-\d{{2}})$", changelog, re.M
    )
    claims = (
        (tag == f"v{version}", f"The tag is {tag}, the version of the package is {version}."),
        (bool(dates), f"CHANGELOG.md has no section '## [{version}] - YEAR-MONTH-DAY'."),
        (
            _first(r"^version: (.+)$", citation) == version,
            f"CITATION.cff has another version than {version}.",
        ),
        (
            [_first(r"^date-released: (.+)$", citation)] == dates or not dates,
            "CITATION.cff has another date than CHANGELOG.md.",
        ),
        (
            {urls["Homepage"], _first(r"^repository-code: (.+)$", citation)} == {repository},
            f"The addresses in pyproject.toml and CITATION.cff are not {repository}.",
        ),
    )
    return [sentence for holds, sentence in claims if not holds]


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.M)
    return match[1] if match else ""


if __name__ == "__main__":
    if sentences := disagreements(*sys.argv[1:3]):
        sys.exit("\n".join(sentences))
