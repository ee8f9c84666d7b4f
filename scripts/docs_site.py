"""Hooks of MkDocs: what is written for readers of the repository becomes the site, without a second copy of anything.

`mkdocs.yml` names this file. Pages of the site that lie elsewhere (`PAGES`) and every file that a page links to outside
of docs/ are added under names of their own; links are turned to these. A code block's word ``notest``, which is for the
tests, is dropped.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md", "docs/README.md": "index.md",
}  # fmt: skip
"""Files of the repository, and what they are called in the site."""
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".sh": "bash"}
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^( *```\w+) \w+$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie elsewhere, and the files that pages link to."""
    for source, name in PAGES.items():
        if source != "docs/README.md" and (ROOT / source).exists():
            files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    linked: set[str] = set()
    for page in [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in PAGES if (ROOT / name).exists())]:
        folder = page.parent.relative_to(ROOT).as_posix()
        for target, _ in LINK.findall(page.read_text(encoding="utf-8")):
            path = posixpath.normpath(posixpath.join(folder, target))
            if not path.startswith("docs/") and path not in PAGES and (ROOT / path).is_file():
                linked.add(path)
    for path in sorted(linked):
        files.append(File.generated(config, f"source/{path}.md", content=_shown(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links, and drop words behind a code block's language."""
    here = page.file.src_uri
    source = next((path for path, name in PAGES.items() if name == here), f"docs/{here}")
    base = posixpath.dirname(source)

    def turned(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(base, match[1]))
        if path in PAGES:
            target = PAGES[path]
        elif path.startswith("docs/"):
            target = path.removeprefix("docs/")
        elif (ROOT / path).is_file():
            target = f"source/{path}.md"
        else:
            return match[0]
        return f"]({posixpath.relpath(target, posixpath.dirname(here) or '.')}{match[2] or ''})"

    return FENCE.sub(r"\1", markdown if here.startswith("source/") else LINK.sub(turned, markdown))


def _shown(path: str) -> str:
    text, language = (ROOT / path).read_text(encoding="utf-8"), LANGUAGES.get(Path(path).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n````{language}\n{text}\n````\n"
