"""Hooks of MkDocs: pages from outside ``docs``, links of the repository, and formulas as MathML.

The pages are written for a reader of the repository. The site has the same pages: README.md is its
home page, and the other pages outside ``docs`` are below ``repository/``.
"""

import html
import posixpath
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
# Pages outside docs/, by their path in the repository, and their paths in the site.
PAGES = {"README.md": "index.md"} | {
    path: f"repository/{path}"
    for path in (
        "ARCHITECTURE.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "kfac_engine/data/README.md",
        *(page.relative_to(ROOT).as_posix() for page in sorted(ROOT.glob("bench/results/*.md"))),
    )
}
_SOURCES = {site: path for path, site in PAGES.items()}
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
# What the examples that are executed have besides their code.
_OPTIONS = re.compile(r'(?<=^```python) exec="on".*$', re.M)
_HIDDEN = re.compile(r"^.*# markdown-exec: hide\n", re.M)
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.S)


def on_startup(**_: object) -> None:
    """Let the blocks of the tutorials import modules of the repository."""
    sys.path.append(str(ROOT))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are outside the folder of the documentation."""
    for path, site in PAGES.items():
        files.append(File.generated(config, site, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links to files of the repository by links to pages of the site, or to the host.

    The examples of a page that need a package that is not installed are shown, not executed.
    """
    site = page.file.src_uri
    if requirement(markdown):
        markdown = _OPTIONS.sub("", _HIDDEN.sub("", markdown))
    if site == PAGES["README.md"]:
        page.meta["hide"] = ["navigation"]  # it would list this page only
    folder = posixpath.dirname(_SOURCES.get(site, f"docs/{site}"))

    def target(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[1]))
        linked = PAGES.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(linked) is None:
            return f"{config.repo_url}/blob/main/{path}"
        return posixpath.relpath(linked, posixpath.dirname(site) or ".")

    return _LINK.sub(target, markdown)


def requirement(markdown: str) -> str | None:
    """Return the package that the examples of a page need and that is not installed, if any."""
    for package in re.findall(r'files\("([^"]+)"\)', markdown):
        try:
            distribution(package)
        except PackageNotFoundError:
            return str(package)
    return None


def on_post_build(config: MkDocsConfig) -> None:
    """Write the files of the page "Train in your browser"."""
    from scripts.browser_files import write

    write(Path(config.site_dir) / "browser")


def on_page_content(content: str, **_: object) -> str:
    """Replace formulas in LaTeX by MathML, which browsers draw without a script."""

    def drawn(formula: re.Match[str]) -> str:
        display = "block" if formula[2] == "[" else "inline"
        return str(convert(html.unescape(formula[3]).strip(), display=display))

    return _FORMULA.sub(drawn, content)
