"""The live page of a server, ``GET /nixl/v1/ui``: `routes` serves it, `document` makes it.

The page has no data and needs no token. Its script asks for the token, keeps it in a variable, and reads ``/status``,
``/history`` and ``/plan`` with it, as any client would. It is put together from ``ui.html``, ``ui.css`` and ``ui.js``
with the treemap of `vllm_nixl_plugin.pages`; it loads nothing, and the policy that goes with it forbids it to.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from vllm_nixl_plugin import pages


@cache
def document() -> str:
    """The page. The same for every server and everybody."""
    body, style, script = (
        files(__package__).joinpath(f"ui.{kind}").read_text("utf-8") for kind in ("html", "css", "js")
    )
    return pages.page(
        "Weights", styles=(pages.asset("treemap.css"), style), scripts=(pages.asset("treemap.js"), script), body=body
    )


@cache
def headers() -> Mapping[str, str]:
    """What goes with the page: only the styles and scripts that are in it run, and they reach this server only."""
    policy = "; ".join([
        "default-src 'none'", "connect-src 'self'", f"script-src {_hashes('script')}", f"style-src {_hashes('style')}",
        "img-src data:", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
    ])  # fmt: skip
    return {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-store",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def _hashes(tag: str) -> str:
    texts = re.findall(rf"<{tag}>(.*?)</{tag}>", document(), re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
