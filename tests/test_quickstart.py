"""The commands of the quick start run, in their order, against real servers. Its Python: test_docs.py.

Not run: starting servers as a user does (tests/test_startup.py has that), installing, and what names other hosts.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness import TOKEN, EngineOptions, Server, servers

PAGE = Path(__file__).parent.parent / "docs" / "quickstart.md"
RUN = ("vllm-nixl ", "curl ")
NOT_HERE = ("host-b", " --watch", " -- ", "doctor")
"""Another host; what does not end by itself; what starts a server, or measures: these have tests of their own."""


def lines() -> list[str]:
    """Every command of the page's shell blocks."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    found = [line.partition(" #")[0] for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in found if line.strip()]


@pytest.mark.server
@pytest.mark.slow
def test_the_commands_of_the_quick_start_run(checkpoint, tmp_path: Path) -> None:
    weights = checkpoint("qwen3", 1)
    wanted = [line for line in lines() if line.startswith(RUN) and not any(word in line for word in NOT_HERE)]
    assert {line.split()[1] for line in wanted if line.startswith("vllm-nixl")} >= {
        "status", "push", "verify", "fingerprint", "pause", "resume",
    }  # fmt: skip
    options = EngineOptions()
    with servers(Server(weights, options), Server(weights, options)) as both:
        script = "\n".join(
            ["set -ex", *(line.replace("curl ", "curl --fail --silent --show-error ", 1) for line in wanted)]
        )
        for port, server in zip(("8000", "8001"), both, strict=True):
            script = script.replace(f"http://localhost:{port}", server.url)
        script = script.replace("path/to/checkpoint", str(weights))
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PUSH_WEIGHTS_TOKEN": TOKEN,
        }  # fmt: skip
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        assert "weights step-100" in done.stdout or '"step-100"' in done.stdout


def test_what_is_not_run_is_only_what_a_user_starts_or_sets() -> None:
    others = {re.sub(r"^(\w+=\S* )+", "", line).split()[0] for line in lines() if not line.startswith(RUN)}
    assert others <= {"pip", "export", "vllm"}
