"""``vllm-nixl plan``: what a push brings where, by home, module and worker; as text, JSON, or a page with a treemap.

The server plans if it has not yet (its own checkpoint), or tells the plan used last. ``source`` in the JSON is what
the text calls *fallback*: whole weights that vLLM's own loader reads when the update is prepared.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from trainer_client.commands.options import Json, TokenFile
from trainer_client.commands.output import console
from trainer_client.commands.plan_page import plan_page
from trainer_client.control import Control
from trainer_client.environment import read_token
from trainer_client.report import format_nbytes
from vllm_nixl_plugin.errors import InvalidRequest

HOMES = {"live": "live", "shadow": "shadow", "source": "fallback"}
"""Homes of the wire, and what people call them."""
SHOWN = 10

Summary = Mapping[str, Any]


def plan(
    url: Annotated[str, typer.Argument(metavar="URL", help="Base URL of the server, http://host:port.")],
    worker: Annotated[int | None, typer.Option(help="Only this worker.")] = None,
    depth: Annotated[int, typer.Option(min=0, help="How deep the tree of modules goes.")] = 3,
    digest: Annotated[str | None, typer.Option(help="Another plan than the one used last.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with a treemap there.")] = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Tell what a push to this server brings where: bytes by home, by module and by worker.

    Before the first push, that of the checkpoint that the server started from.
    """
    with Control(url, token=read_token(token_file)) as control:
        workers = control.plan_summary(digest)
    if worker is not None:
        known = [each["worker"] for each in workers]
        workers = [each for each in workers if each["worker"] == worker]
        if not workers:
            raise InvalidRequest(f"{url} has no worker {worker}, only {known}")
    if html is not None:
        try:
            html.write_text(plan_page(url, workers), "utf-8")
        except OSError as error:
            raise InvalidRequest(f"{html} cannot be written: {error}") from None
    if as_json:
        print(json.dumps({"server": url, "workers": workers}))
        return
    out = console()
    out.print(by_worker(workers))
    out.print(tree(workers, depth))
    for line in remarks(workers):
        out.print(escape(line))
    if html is not None:
        out.print(f"wrote {html}")


def by_worker(workers: Sequence[Summary]) -> Table:
    """A row for each worker: bytes on the wire and by home, copies, and what mode ``streamed`` needs, where told."""
    streamed = any(each.get("streamed") for each in workers)
    head = ["worker", "to receive", *HOMES.values(), "copies", *(["smallest streamed window"] if streamed else [])]
    made = Table(*head)
    for each in workers:
        homes = [format_nbytes(each["nbytes_by_home"].get(home, 0)) for home in HOMES]
        window = (each.get("streamed") or {}).get("smallest_budget_nbytes")
        made.add_row(
            str(each["worker"]), format_nbytes(each["nbytes"]), *homes, str(each["copies"]),
            *([format_nbytes(window) if window is not None else "-"] if streamed else []),
        )  # fmt: skip
    return made


@dataclass
class _Module:
    """A node of the tree: bytes by home, of all workers, and what is below."""

    homes: Counter[str] = field(default_factory=Counter)
    children: dict[str, _Module] = field(default_factory=dict)

    def key(self) -> tuple[Any, ...]:
        """Equal for modules that are alike in all but their names."""
        return tuple(sorted(self.homes.items())), tuple((name, child.key()) for name, child in self.children.items())


def tree(workers: Sequence[Summary], depth: int) -> Tree:
    """Modules to ``depth``, with bytes of all workers by home. Numbered modules that are alike are one line."""
    root = _Module()
    for each in workers:
        for destination in each["destinations"]:
            node, home = root, destination["home"]
            for name in ("", *destination["names"][0].split(".")):
                node = node.children.setdefault(name, _Module()) if name else node
                node.homes[home] += destination["nbytes"]
    made = Tree(_label("all", root))
    _grow(made, root, depth)
    return made


def _grow(branch: Tree, node: _Module, depth: int) -> None:
    if depth <= 0:
        return
    children = list(node.children.items())
    while children:
        name, child = children.pop(0)
        last, alike, key = name, 1, child.key()
        while name.isdecimal() and children and children[0][0].isdecimal() and children[0][1].key() == key:
            last, alike = children.pop(0)[0], alike + 1
        label = name if alike == 1 else f"{name} to {last} ({alike} alike, each)"
        _grow(branch.add(_label(label, child)), child, depth - 1)


def _label(name: str, node: _Module) -> str:
    homes = [f"{HOMES[home]} {format_nbytes(node.homes[home])}" for home in HOMES if node.homes[home]]
    only = f", all {HOMES[next(iter(node.homes))]}" if len(homes) == 1 else f" ({', '.join(homes)})" if homes else ""
    return f"{escape(name)}  [dim]{format_nbytes(node.homes.total())}{only}[/]"


def remarks(workers: Sequence[Summary]) -> Iterable[str]:
    """Why something is not live, what is not used, what is stale."""
    why: Counter[str] = Counter()
    for each in workers:
        for destination in each["destinations"]:
            if destination["reason"]:
                why[destination["reason"]] += destination["nbytes"]
    if why:
        yield "not live, since"
        yield from (f"  {format_nbytes(nbytes):>10}  {reason}" for reason, nbytes in why.most_common(SHOWN))
    for title, key in (("fallback (vLLM's own loader runs on these)", "fallback"), ("not used by the model", "unused")):
        names = sorted({name for each in workers for name in each[key]})
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            yield f"{title}: {', '.join(names[:SHOWN])}{more}"
    if stale := sorted({name for each in workers for name in each["stale"]}):
        yield f"stale: {', '.join(stale)} (the plan has no weights for it)"
