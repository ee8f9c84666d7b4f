#!/usr/bin/env python3
"""Drive the pages of the project in a real browser, check what they show, and write pictures for the documentation.

usage: make screenshots      (or: .venv/bin/python scripts/screenshots.py [FOLDER]; default docs/images)

It needs Chromium (Debian, Ubuntu: `apt-get install chromium`; or CHROMIUM=/path/to/it), which it starts without a
window and speaks to over its DevTools protocol; and it starts a small server, as the tests do. What it checks:

    live page     without a token it asks for one; a wrong one is refused; the right one is neither in the page nor in
                  any storage; versions, pushes (one of them refused), stages and the plan are shown; a push that comes
                  meanwhile appears by itself; the policy of the page keeps foreign scripts out; nothing was requested
                  from anywhere else, and no error is in the console
    timeline      as many bars as spans, and nothing is requested
"""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from websockets.sync.client import ClientConnection, connect

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

ASIDE = ROOT / "build" / "screenshots"
"""For pictures that no page of the documentation shows."""
WAIT_S = 60.0
FLAGS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--remote-debugging-port=0",
    "--force-color-profile=srgb",
]  # fmt: skip


class Browser:
    """One page of a Chromium, over its DevTools protocol."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._numbers = connection, itertools.count(1)
        self.requests: list[str] = []
        self.problems: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command; events that come before its answer are noted."""
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._connection.recv(timeout=WAIT_S))
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return dict(message["result"])
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event["method"] == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event["method"] == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def expect(self, expression: str) -> None:
        """Wait until it is true. Errors: AssertionError."""
        deadline = time.monotonic() + WAIT_S
        while not self.evaluate(expression):
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"not within {WAIT_S:g} s: {expression}\n{self.evaluate('document.body.innerText')}"
                )
            time.sleep(0.05)

    def open(self, url: str, width: int = 1240, height: int = 900) -> None:
        """Load a page."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=url)
        self.expect(f"document.readyState === 'complete' && location.href === {json.dumps(url)}")

    def type_token(self, token: str) -> None:
        """Into the form of the live page, with real key strokes."""
        self.evaluate("document.getElementById('token').focus()")
        self.call("Input.insertText", text=token)
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
            )

    def shoot(self, path: Path, *, dark: bool = False) -> None:
        """A picture of the whole page."""
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        time.sleep(0.4)  # the transition of the bar
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
        Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB").quantize(96).save(path, optimize=True)
        print(f"{path.name}: {path.stat().st_size // 1000} kB")


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A Chromium of our own, with an empty profile."""
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    binary = next((found for name in names if name and (found := shutil.which(name))), None)
    if binary is None:
        sys.exit("screenshots: no Chromium found: apt-get install chromium, or set CHROMIUM to one")
    with tempfile.TemporaryDirectory() as profile:
        command = [binary, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port_file, deadline = Path(profile, "DevToolsActivePort"), time.monotonic() + WAIT_S
            while not port_file.exists() or not port_file.read_text():
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"screenshots: {binary} did not start")
                time.sleep(0.05)
            port = port_file.read_text().split()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=10) as answer:
                [url] = [page["webSocketDebuggerUrl"] for page in json.load(answer) if page["type"] == "page"]
            with connect(url, max_size=None) as connection:
                yield Browser(connection)
        finally:
            process.terminate()
            process.wait(30)


def live_page(page: Browser, server: Any, weights: dict[str, Any], folder: Path) -> Any:
    """Check the live page of a server that has had no push yet. Returns the reports of the pushes it has had then."""
    from harness import TOKEN
    from trainer_client import WeightClient

    url = f"{server.url}/nixl/v1/ui"
    page.open(url, height=700)
    page.expect("!document.getElementById('login').hidden && document.getElementById('main').hidden")
    assert {r for r in page.requests if r.startswith("http")} <= {url, f"{server.url}/favicon.ico"}, page.requests
    page.type_token("a wrong token, to see it refused")
    page.expect("document.getElementById('refused').textContent.includes('not the token of this server')")
    page.shoot(ASIDE / "live-login.png")

    page.type_token(TOKEN)
    page.expect("!document.getElementById('main').hidden && !document.getElementById('none').hidden")
    places = "localStorage, sessionStorage, document.cookie, location.href, document.documentElement.outerHTML"
    assert TOKEN not in page.evaluate(f"JSON.stringify([{places}, document.getElementById('token').value])")

    with WeightClient([server.url], token=TOKEN) as client:
        reports = []
        for number in range(1, 4):
            reports.append(client.push_weights(weights, version=f"step-{number}"))
            page.expect(f"document.querySelector('#pushes tbody').rows.length === {number}")
        update = begin(server.url, TOKEN)
        page.expect("!document.getElementById('now').hidden")
        page.shoot(ASIDE / "live-under-way.png")
        commit(server.url, TOKEN, update)
        page.expect("document.querySelector('#pushes .why')?.textContent.startsWith('incomplete')")
        reports.append(client.push_weights(weights, version="step-5"))
    page.expect("document.querySelector('#versions [aria-current]').textContent === 'step-5'")
    shown = page.evaluate("[...document.querySelectorAll('#versions li')].map(item => item.textContent).join()")
    assert shown == "step-1,step-2,step-3,step-5", shown
    assert page.evaluate("document.querySelectorAll('#pushes .stages i').length") >= 16
    page.evaluate("document.getElementById('plan-show').click()")
    page.expect("document.querySelectorAll('#map .nixl-leaf').length > 5")
    page.expect("document.getElementById('link').textContent.startsWith('as of')")
    page.shoot(folder / "live.png")
    page.shoot(ASIDE / "live-dark.png", dark=True)
    unexpected = [line for line in page.problems if "401" not in line and "favicon" not in line]
    assert unexpected == [], unexpected

    page.evaluate(
        "document.addEventListener('securitypolicyviolation', e => window.kept = e.violatedDirective);"
        "const s = document.createElement('script'); s.textContent = 'window.broken = 1'; document.body.append(s)"
    )
    page.expect("window.kept?.startsWith('script-src')")
    assert page.evaluate("window.broken") is None
    page.evaluate("document.getElementById('leave').click()")
    page.expect("document.getElementById('main').hidden && !document.getElementById('login').hidden")
    hosts = {"/".join(request.split("/")[:3]) for request in page.requests}
    assert hosts == {server.url}, hosts
    return reports


def begin(url: str, token: str) -> str:
    """Open an update for the server's own checkpoint, as a trainer would that then sends nothing; its id."""
    with api(url, token) as http:
        manifest = {"weights": http.get("/checkpoint").json()["weights"]}
        plans = http.post("/plan", json=manifest, headers={"Accept": "application/json"}).json()["workers"]
        body = {"plans": [worker["plan"] for worker in plans], "version": "step-4", "holder": "a trainer that stops"}
        answer = http.post("/updates", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["update_id"])


def commit(url: str, token: str, update: str) -> None:
    """Ask for the install of bytes that have not come."""
    with api(url, token) as http:
        answer = http.post(f"/updates/{update}/commit?wait_s=10", json={"timeout_s": 0.2})
        assert answer.json()["state"] == "failed", answer.text


def api(url: str, token: str) -> Any:
    """An HTTP client of the routes."""
    import httpx

    return httpx.Client(base_url=f"{url}/nixl/v1", headers={"Authorization": f"Bearer {token}"}, timeout=60)


def timeline(page: Browser, report: Any, picture: Path) -> None:
    """Check the page of a report."""
    from trainer_client.timeline import lanes

    with tempfile.TemporaryDirectory() as held:
        file = Path(held, "push.html")
        file.write_text(report.to_html(), encoding="utf-8")
        page.requests.clear()
        page.open(file.as_uri(), height=500)
        spans = [span for server in report.servers for lane in lanes(server) for span in lane.spans]
        assert page.evaluate("document.querySelector('svg').querySelectorAll('rect').length") == len(spans)
        page.shoot(picture)
        assert page.requests == [file.as_uri()], page.requests


def two_ranks(url: str, folder: Path) -> Any:
    """The report of a trainer of two ranks, each with half of every matrix, to a server."""
    code = f"""
import json, pathlib
import torch.distributed as dist
from harness.checkpoints import read_weights
from trainer_client import LocalShard, WeightClient
dist.init_process_group("gloo")
rank, parts = dist.get_rank(), {{}}
for name, whole in read_weights(pathlib.Path({str(folder)!r})).items():
    half = -(-whole.shape[0] // 2)
    mine = whole[half * rank : half * (rank + 1)].clone()
    parts[name] = LocalShard(mine, global_shape=tuple(whole.shape), offsets=(half * rank, *[0] * (whole.ndim - 1)))
with WeightClient([{url!r}], send_buffer_bytes=1 << 16) as client:
    client.push_weights(parts)
    report = client.push_weights(parts)
if rank == 0:
    print("REPORT", json.dumps(report.to_dict()))
dist.destroy_process_group()
"""
    from harness import TOKEN
    from trainer_client import PushReport

    with tempfile.TemporaryDirectory() as held:
        script = Path(held, "ranks.py")
        script.write_text(code)
        quiet = {"OMP_NUM_THREADS": "1", "PUSH_WEIGHTS_TOKEN": TOKEN, "GLOO_SOCKET_IFNAME": "lo",
                 "PYTHONPATH": str(ROOT / "tests")}  # fmt: skip
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
        done = subprocess.run(run, env=os.environ | quiet, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return PushReport.from_dict(json.loads(done.stdout.split("REPORT ")[1].splitlines()[0]))


def main() -> None:
    """See the module."""
    from harness import Server, close_launcher
    from harness.checkpoints import read_weights, write_checkpoint

    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "docs" / "images")
    for made in (folder, ASIDE):
        made.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as held, browser() as page:
            first, other = (write_checkpoint(Path(held, f"qwen3-{seed}"), "qwen3", seed) for seed in (1, 2))
            with Server(first) as server:
                reports = live_page(page, server, read_weights(other), folder)
                timeline(page, reports[0], ASIDE / "timeline-first.png")
                timeline(page, two_ranks(server.url, other), folder / "timeline.png")
    finally:
        close_launcher()
    print("screenshots: all checks passed")


if __name__ == "__main__":
    main()
