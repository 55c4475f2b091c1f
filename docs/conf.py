"""Settings of the site that `make docs` builds from this folder."""

import os
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

import sinkprune

sys.path.insert(0, str(Path(__file__).parent))

project = "sinkprune"
version = release = sinkprune.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "generated"]
html_theme = "furo"
html_title = f"{project} {release}"
html_show_copyright = False
html_copy_source = False

# `:::` starts a directive. GitHub shows it as text, and a fence of backticks would be read as a printed command.
myst_enable_extensions = ["colon_fence"]
# The depth of headings that links may name, as on GitHub.
myst_heading_anchors = 4
highlight_language = "text"
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True

# Pages outside this folder that are also pages of the site.
INCLUDED = {
    "README.md": "start.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "src/sinkprune/demo/pocket/README.md": "pocket-llava.md",
    "src/sinkprune/demo/pocket-qwen3/README.md": "pocket-qwen3.md",
    "src/sinkprune/demo/pocket-robot/README.md": "pocket-robot.md",
    "src/sinkprune/demo/pocket-oft/README.md": "pocket-oft.md",
}
DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def with_links(text: str, folder: Path, page: Path) -> str:
    """Return the text of `folder` with its links as from `page`, and those to included pages to their place here."""

    def link(found: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / found[1]))
        if inside := INCLUDED.get(target.relative_to(ROOT).as_posix()) if target.is_relative_to(ROOT) else None:
            target = DOCS / inside
        return f"]({os.path.relpath(target, page)}{found[2] or ''})"

    return LINK.sub(link, text)


def page_links(app: Sphinx, page: str, source: list[str]) -> None:
    folder = (DOCS / page).parent
    source[0] = with_links(source[0], folder, folder)


def included_links(app: Sphinx, path: Path, page: str, source: list[str]) -> None:
    text = re.sub(r"\A---\n.*?\n---\n", "", source[0], flags=re.DOTALL)
    source[0] = with_links(text, (DOCS / path).resolve().parent, DOCS)


def setup(app: Sphinx) -> None:
    app.connect("source-read", page_links)
    app.connect("include-read", included_links)
