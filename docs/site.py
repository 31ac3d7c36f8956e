"""The parts of the site that lie outside docs/: the README as its first page, and what pages link to."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
RENAMED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
OUTSIDE = "files/"
"""Where the site has what lies outside docs/."""
_LINK = re.compile(r"(\]\()([^)#: ]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie beside docs/, and every file that a page links to."""
    from mkdocs.structure.files import File

    waiting = [_in_repository(page.src_uri) for page in files.documentation_pages()]
    waiting += RENAMED
    while waiting:
        path = waiting.pop()
        name = _in_site(path)
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, content=(ROOT / path).read_bytes()))
        if path.endswith(".md"):
            text = (ROOT / path).read_text(encoding="utf-8")
            linked = {_target(path, link[2]) for link in _LINK.finditer(text)}
            waiting += [p for p in linked if files.get_file_from_path(_in_site(p)) is None
                        and (ROOT / p).is_file()]  # fmt: skip
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point every link at its target's place in the site."""
    own = page.file.src_uri
    path = _in_repository(own)

    def moved(link: re.Match[str]) -> str:
        target = _in_site(_target(path, link[2]))
        return link[1] + posixpath.relpath(target, posixpath.dirname(own) or ".")

    return _LINK.sub(moved, markdown)


def _target(path: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def _in_site(path: str) -> str:
    return RENAMED.get(path) or (path[5:] if path.startswith("docs/") else OUTSIDE + path)


def _in_repository(name: str) -> str:
    renamed = {site: path for path, site in RENAMED.items()}
    outside = name.removeprefix(OUTSIDE) if name.startswith(OUTSIDE) else f"docs/{name}"
    return renamed.get(name, outside)
