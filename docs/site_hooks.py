"""Titles and language of the Chinese pages on the site, for MkDocs (`hooks` in mkdocs.yml)."""

from __future__ import annotations

import re
from typing import Any

CHINESE = "docs/zh/"
_COMMENT = re.compile(r"\A<!--.*?-->\s*", re.DOTALL)


def on_page_read_source(page: Any, config: Any) -> str | None:
    """A page without the comment that names its source: MkDocs takes a title from a page's first line alone."""
    if not page.file.src_uri.startswith(CHINESE):
        return None
    with open(page.file.abs_src_path, encoding="utf-8") as file:
        return _COMMENT.sub("", file.read())


def on_nav(nav: Any, config: Any, files: Any) -> Any:
    """Their folder's name is no title."""
    for item in nav:
        _name(item)
    return nav


def _name(item: Any) -> None:
    if item.is_section:
        if item.title == "Zh":
            item.title = "中文"
        for child in item.children:
            _name(child)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Their language, by which a browser chooses the shapes of characters."""
    if page.file.src_uri.startswith(CHINESE):
        return output.replace('<html lang="en"', '<html lang="zh-Hans"', 1)
    return output
