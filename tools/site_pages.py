"""A hook of mkdocs: CONTRIBUTING, CHANGELOG and LOG of the top folder as pages of the site, with links that resolve.

Links are written for GitHub, relative to the file that holds them; on the site these three files lie beside docs/*.md.
The theme's script can load diagrams, facts about a repository and a polyfill from other hosts. This site uses none of
them, and the addresses are made relative, so that nothing can be loaded from there.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "LOG.md": "log.md"}
SOURCES = {page: source for source, page in PAGES.items()}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|[#/])([^)#\s]+)")
REMOTE = re.compile(r"""(?<=["'`])https?://(?!www\.w3\.org/)""")  # w3.org: names of XML dialects, never loaded


def on_files(files: Any, config: Any) -> Any:
    top = posixpath.dirname(config.config_file_path)
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=posixpath.join(top, source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return site_links(markdown, page.file.src_uri)


def site_links(markdown: str, page: str) -> str:
    """Links of `page`, a path in docs or one of the three, as they are on the site."""
    folder = posixpath.dirname(page)
    source = SOURCES.get(page, posixpath.join("docs", page))

    def rewrite(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        if target in PAGES:
            return posixpath.relpath(PAGES[target], folder)
        return posixpath.relpath(target, "docs") if page in SOURCES and target.startswith("docs/") else link[1]

    return LINK.sub(rewrite, markdown)


def on_post_build(config: Any) -> None:
    for script in Path(config.site_dir, "assets", "javascripts").glob("bundle.*.js"):
        script.write_text(REMOTE.sub("", script.read_text()))
