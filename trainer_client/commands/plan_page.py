"""The page of ``vllm-nixl plan --html``: a treemap of all destinations, in one file that loads nothing from elsewhere.

The map is `vllm_nixl_plugin/pages/treemap.js`, the page around it `plan.js` and `plan.css` beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_nixl_plugin.pages import as_script, asset, page


def plan_page(server: str, workers: Sequence[Mapping[str, Any]]) -> str:
    """The page for the plans of a server's workers (as `Control.plan_summary` gives them)."""
    reasons: dict[str, int] = {"": 0}
    leaves = [
        {
            "path": destination["names"][0],
            "also": destination["names"][1:],
            "nbytes": destination["nbytes"],
            "received": destination["received_nbytes"],
            "home": destination["home"],
            "worker": each["worker"],
            "reason": reasons.setdefault(destination["reason"], len(reasons)),
        }
        for each in workers
        for destination in each["destinations"]
    ]
    data = {"server": server, "leaves": leaves, "reasons": list(reasons)}
    return page(
        f"plan of {server}",
        styles=(asset("treemap.css"), asset("plan.css")),
        scripts=(asset("treemap.js"), f"const plan = {as_script(data)};", asset("plan.js")),
        body='<header><h1></h1><p></p></header><form></form><ul></ul><main><div id="map"></div></main>',
    )
