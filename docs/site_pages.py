"""A hook of mkdocs: what the site has from outside of ``docs/``, and the links to and from it.

The README is the landing page, and the changelog and the measurements are pages, too. Scripts and manifests
of ``deploy/`` are files of the site. Each has one copy, the one that a reader of the repository sees.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]

PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "changes/README.md": "changes.md",
    "benchmarks/RESULTS.md": "results.md",
    "benchmarks/HISTORY.md": "results-history.md",
    "benchmarks/results/README.md": "results-format.md",
}
"""Where a page stands in the repository, and its name in the site."""

_FIGURES = "benchmarks/figures"
_RECIPES = "deploy"
_OF_RECIPES = {".sbatch", ".sh", ".yaml"}
_CODE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds pages, figures and recipes from outside of ``docs/``."""
    for source, name in PAGES.items():
        text = links_in_site((ROOT / source).read_text(), source)
        files.append(File.generated(config, name, content=text))
    for figure in sorted((ROOT / _FIGURES).glob("*.png")):
        files.append(File.generated(config, f"figures/{figure.name}", abs_src_path=str(figure)))
    for recipe in sorted((ROOT / _RECIPES).rglob("*.*")):
        if recipe.suffix in _OF_RECIPES:
            name = recipe.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(recipe)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links out of ``docs/`` to the pages that they have in the site."""
    if page.file.src_uri in PAGES.values():
        return markdown  # done in on_files
    return links_in_site(markdown, f"docs/{page.file.src_uri}")


def links_in_site(text: str, source: str) -> str:
    """A page's text with its links as the site has them.

    Args:
        text: markdown, with links relative to the page's place in the repository.
        source: that place, such as ``benchmarks/RESULTS.md``.
    """
    folder = posixpath.dirname(_in_site(source))

    def target(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        return posixpath.relpath(_in_site(path), folder or ".")

    parts = _CODE.split(text)  # code, which is every second part, has brackets that are no links
    return "".join(part if number % 2 else _LINK.sub(target, part) for number, part in enumerate(parts))


def _in_site(path: str) -> str:
    """Where a file of the repository stands in the site."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith(f"{_FIGURES}/"):
        return path.removeprefix("benchmarks/")
    return path.removeprefix("docs/")
