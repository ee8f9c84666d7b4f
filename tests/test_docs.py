"""What the documentation says is so: its code runs, its commands and names exist, its links lead somewhere."""

import ast
import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import TOKEN, Server, completions, reference, servers

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
EXAMPLES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").glob("*.py"))
TAUGHT = ["README.md", "docs/quickstart.md"]  # their Python runs, block after block
BLOCK = re.compile(r"^ *```(\w*)(?: (\w+))?\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)

every_page = pytest.mark.parametrize("page", NAMES)


def blocks(page: str, language: str) -> Iterator[tuple[str, bool]]:
    """The text of the code blocks of a language, and whether they are to be run."""
    for kind, word, text in BLOCK.findall((ROOT / page).read_text()):
        if kind == language:
            assert word in ("", "notest"), word
            yield text, word == ""


def prose(page: str) -> str:
    return BLOCK.sub("", (ROOT / page).read_text())


# Links and words


@every_page
def test_every_link_within_the_repository_leads_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        found = (ROOT / page).parent / path if path else ROOT / page
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", found.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings], target


@pytest.mark.parametrize("page", [*NAMES, *EXAMPLES])
def test_no_page_knows_the_machine_it_was_written_on(page: str) -> None:
    text = (ROOT / page).read_text()
    found = re.findall(
        r"(?<![\w.])/(?:work|home|root|Users|tmp|mnt)/|pypi\.|pytorch\.org|artifactory|index\.html", text
    )
    assert found == []


@every_page
def test_every_file_that_is_named_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    for name in re.findall(r"(?<![\w/.])((?:examples|benchmarks|scripts|tests|docs)/[\w./-]*\w)", text):
        assert (ROOT / name).exists(), name


def test_the_modules_of_the_design_exist() -> None:
    table = (ROOT / "docs/design.md").read_text().split("| Stage | Module |")[1].split("\n\n")[0]
    for name in re.findall(r"`([\w.]+)`", "\n".join(line.split("|")[2] for line in table.splitlines()[2:])):
        places = [ROOT / f"{name.replace('.', '/')}.py", ROOT / "vllm_nixl_plugin" / f"{name}.py",
                  ROOT / "trainer_client" / f"{name}.py"]  # fmt: skip
        assert any(place.exists() for place in places), name


# Names of the product


def test_every_error_code_has_its_line_and_no_other() -> None:
    from vllm_nixl_plugin.errors import _classes

    table = (ROOT / "docs/troubleshooting.md").read_text().split("## Error codes")[1].split("## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(_classes())


@every_page
def test_every_setting_that_is_named_exists(page: str) -> None:
    from vllm_nixl_plugin.settings import known

    assert set(re.findall(r"PUSH_WEIGHTS_\w*[A-Z]", (ROOT / page).read_text())) <= known()


def test_the_quick_start_explains_every_stage_of_a_report() -> None:
    from trainer_client.report import STAGES

    table = (ROOT / "docs/quickstart.md").read_text().split("| Stage |")[1].split("\n\n")[0]
    assert (*re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE), "total") == STAGES


@pytest.mark.parametrize("page", TAUGHT)
def test_python_calls_only_what_there_is(page: str) -> None:
    from trainer_client import WeightClient

    known = {
        "WeightClient": set(inspect.signature(WeightClient).parameters),
        "push_weights": set(inspect.signature(WeightClient.push_weights).parameters),
    }
    for text, _ in blocks(page, "python"):
        for call in ast.walk(ast.parse(text)):
            if isinstance(call, ast.Call):
                name = getattr(call.func, "id", getattr(call.func, "attr", ""))
                assert {k.arg for k in call.keywords} <= known.get(name, {k.arg for k in call.keywords}), name


# Commands


def commands(page: str) -> Iterator[list[str]]:
    """Every command of the page's shell blocks, without the assignments before it."""
    for text, _ in blocks(page, "bash"):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(re.sub(r"\$\([^)]*\)", "SUBSTITUTED", line), comments=True)
            while words and re.match(r"^\w+=", words[0]):
                words.pop(0)
            if words:
                yield words


@every_page
def test_every_command_exists_with_its_options(page: str) -> None:
    for words in commands(page):
        name, *rest = words
        check = globals().get(f"check_{name.replace('-', '_')}")
        assert check, f"no check for {words}: add check_{name}"
        check(rest)


def check_make(rest: list[str]) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {word for word in rest if "=" not in word} <= targets


def check_pip(rest: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = re.fullmatch(r"\.\[(\w+)\]", rest[1])
    assert rest[0] == "install"
    assert found, rest
    assert found.group(1) in extras


def check_vllm_nixl(rest: list[str]) -> None:
    import typer

    from trainer_client.cli import app

    group = typer.main.get_command(app)
    command = group.commands[rest[0]]
    command.make_context(rest[0], rest[1:]).close()


def check_vllm(rest: list[str]) -> None:
    assert rest[0] == "serve"  # its options: the test below


def check_python(rest: list[str]) -> None:
    assert (ROOT / rest[0]).exists()
    for word in rest[1:]:
        assert word in (ROOT / rest[0]).read_text()


def check_curl(rest: list[str]) -> None:
    from vllm_nixl_plugin.api import router

    [url] = [word for word in rest if word.startswith("http://")]
    path = re.sub(r"^http://[^/]*|\?.*", "", url)
    assert path in {route.path for route in router.routes if "GET" in route.methods}


def check_export(rest: list[str]) -> None:
    assert all(re.match(r"^PUSH_WEIGHTS_\w+=", word) for word in rest)


@pytest.mark.slow
def test_vllm_knows_every_option_that_a_page_gives_it() -> None:
    vllm = Path(sys.executable).with_name("vllm")
    wanted = {w for page in NAMES for c in commands(page) if c[0] == "vllm" for w in c if w.startswith("--")}
    wanted |= set(re.findall(r'"(--[\w-]+)"', (ROOT / "examples/demo.py").read_text()))
    shown = subprocess.run([vllm, "serve", "--help=all"], capture_output=True, text=True, check=True, timeout=300)
    assert wanted
    assert wanted <= set(re.findall(r"--[\w-]+", shown.stdout))


# Python


@pytest.mark.server
@pytest.mark.parametrize("page", TAUGHT)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: str, checkpoint, tmp_path: Path) -> None:
    trained = checkpoint("qwen3", 2)
    with servers(Server(checkpoint("qwen3", 1)), Server(checkpoint("qwen3", 1))) as both:
        code = "\n".join(text for text, run in blocks(page, "python") if run)
        for port, server in zip(("8000", "8001"), both, strict=True):
            code = code.replace(f"http://localhost:{port}", server.url)
        script = tmp_path / "page.py"
        script.write_text(
            "import transformers\n"
            f"model = transformers.AutoModelForCausalLM.from_pretrained({str(trained)!r}, dtype='bfloat16')\n{code}"
        )
        environment = os.environ | {"PUSH_WEIGHTS_TOKEN": TOKEN, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, script], env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{code}\n{done.stdout}{done.stderr}"
        assert completions(both[0].url) == reference(trained)
