"""Parts of HTML pages, as files of the package: `treemap.js` and `treemap.css`, shared by all pages that show weights.

No page loads anything from elsewhere: whoever makes one puts the text of its parts into it (`page`). Used by
``vllm-nixl plan --html`` and by the server's own page.
"""

from __future__ import annotations

import html
import json
from importlib.resources import files
from typing import Any


def asset(name: str) -> str:
    """The text of a file of this package, such as ``treemap.js``."""
    return files(__package__).joinpath(name).read_text("utf-8")


def as_script(value: Any) -> str:
    """JSON that may stand inside of a ``<script>``, whatever the strings in it are."""
    text = json.dumps(value, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def page(title: str, *, styles: tuple[str, ...], scripts: tuple[str, ...], body: str) -> str:
    """One self-contained document. ``styles`` and ``scripts`` are texts, the latter run in order after ``body``."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)}</title>",
            *(f"<style>\n{style}</style>" for style in styles),
            "</head><body>",
            body,
            *(f"<script>\n{script}</script>" for script in scripts),
            "</body></html>",
            "",
        ]
    )
