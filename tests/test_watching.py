"""A folder of checkpoints is watched: each complete one is pushed once, whatever way it came to be there."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fake_server import TOKEN, FakeServer, model, reachable
from trainer_client.checkpoint import read_with_draft
from trainer_client.watching import Watcher
from vllm_nixl_plugin.errors import InvalidRequest


def write(folder: Path, seed: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(model(seed), folder / "model.safetensors")
    return folder


def seen(watcher: Watcher) -> list[str | None]:
    return [found.version for found in watcher.look()]


def test_of_what_is_there_at_the_beginning_the_newest_is_told_and_then_everything_new_once(tmp_path: Path) -> None:
    for number in (9, 10):
        os.utime(write(tmp_path / f"step-{number}") / "model.safetensors", ns=(number, number))
    watcher = Watcher(tmp_path)
    assert [seen(watcher) for _ in range(3)] == [[], ["step-10"], []]
    write(tmp_path / "step-11")
    os.utime(write(tmp_path / "step-12") / "model.safetensors", ns=(2**62, 2**62))
    assert [seen(watcher) for _ in range(3)] == [[], ["step-11", "step-12"], []]
    write(tmp_path / "step-11", 2)
    assert [seen(watcher) for _ in range(3)] == [[], ["step-11"], []]


def test_the_folder_itself_may_be_the_checkpoint(tmp_path: Path) -> None:
    watcher = Watcher(tmp_path)
    assert seen(watcher) == []
    write(tmp_path)
    assert [[found.path for found in watcher.look()] for _ in range(3)] == [[], [tmp_path], []]


def test_one_that_is_being_written_is_not_told(tmp_path: Path) -> None:
    whole = write(tmp_path.parent / f"{tmp_path.name}-source") / "model.safetensors"
    data, folder, watcher = whole.read_bytes(), tmp_path / "step-1", Watcher(tmp_path)
    folder.mkdir()
    file = folder / "model.safetensors"
    for length in (4, 100, len(data) - 1):
        file.write_bytes(data[:length])
        assert [seen(watcher) for _ in range(2)] == [[], []]
    file.write_bytes(data)
    (folder / "other.safetensors.tmp").touch()
    assert [seen(watcher) for _ in range(2)] == [[], []]
    (folder / "other.safetensors.tmp").unlink()
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [seen(watcher) for _ in range(2)] == [[], []]
    save_file({"b": torch.ones(2)}, folder / "model-2.safetensors")
    assert [seen(watcher) for _ in range(2)] == [[], ["step-1"]]


def test_a_marker_or_a_rename_says_that_it_is_complete(tmp_path: Path) -> None:
    marked, renamed = Watcher(tmp_path, "DONE"), Watcher(tmp_path)
    write(tmp_path / "tmp-step-1")
    assert [seen(w) for _ in range(2) for w in (marked, renamed)] == [[], [], [], []]
    (tmp_path / "tmp-step-1").rename(tmp_path / "step-1")
    assert [seen(w) for _ in range(2) for w in (marked, renamed)] == [[], [], [], ["step-1"]]
    (tmp_path / "step-1" / "DONE").touch()
    assert [seen(marked) for _ in range(2)] == [[], ["step-1"]]
    with pytest.raises(InvalidRequest, match="is no folder"):
        Watcher(tmp_path / "nowhere")


def test_weights_of_a_draft_model_come_under_their_prefix(tmp_path: Path) -> None:
    write(tmp_path / "target")
    (tmp_path / "draft").mkdir()
    save_file({"norm": torch.ones(2)}, tmp_path / "draft" / "model.safetensors")
    found = read_with_draft(tmp_path / "target", tmp_path / "draft")
    assert set(found) == {*model(), "draft:norm"}
    assert found["draft:norm"].tolist() == [1, 1]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with reachable() as made:
        yield made


def test_new_checkpoints_are_pushed_under_the_names_of_their_folders(server: FakeServer, tmp_path: Path) -> None:
    write(tmp_path / "step-1", 1)
    options = ["--watch", "--interval-s", "0.1", "--json"]
    command = [sys.executable, "-m", "trainer_client.cli", "push", tmp_path, server.url, *options]
    environment = os.environ | {"PUSH_WEIGHTS_TOKEN": TOKEN}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as pushing:
        assert pushing.stdout
        assert json.loads(pushing.stdout.readline())["version"] == "step-1"
        server.expect(model(1))
        write(tmp_path / ".hidden", 2).rename(tmp_path / "step-2")
        report = json.loads(pushing.stdout.readline())
        assert (report["version"], report["ok"]) == ("step-2", True)
        server.expect(model(2))
        pushing.send_signal(signal.SIGINT)
        pushing.stdout.read()
        assert pushing.wait(30) == 0
