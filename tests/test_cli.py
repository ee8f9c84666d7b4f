"""The command line pushes checkpoints over real sockets and NIXL, and its exit status tells the truth."""

import json
import sys
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import save_file

from fake_server import TOKEN, FakeServer, listening, model
from trainer_client.cli import main
from vllm_nixl_plugin.agent import NixlAgent


@pytest.fixture
def server() -> Iterator[FakeServer]:
    made = FakeServer(NixlAgent)
    made.patience_s = 10.0
    with listening(made) as url:
        made.url = url
        yield made
    for worker in made.workers:
        worker.agent.close()


@pytest.fixture
def vllm_nixl(monkeypatch, capsys):
    """Run the command line; exit status, standard output, standard error."""
    monkeypatch.setenv("PUSH_WEIGHTS_TOKEN", TOKEN)

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["vllm-nixl", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return end.value.code or 0, out, err

    return run


def test_push_sends_a_mapped_checkpoint_and_prints_the_report(vllm_nixl, server, tmp_path) -> None:
    save_file(model(1), tmp_path / "model.safetensors")
    code, out, err = vllm_nixl("push", tmp_path, server.url, "--version", "v1")
    assert (code, err) == (0, "")
    assert "1 of 1 servers" in out
    server.expect(model(1))
    code, out, _ = vllm_nixl("push", tmp_path, server.url, "--mode", "in_place", "--json")
    assert code == 0
    assert json.loads(out)["mode"] == "in_place"


def test_push_fails_when_one_server_is_not_reached(vllm_nixl, server, tmp_path) -> None:
    save_file(model(2), tmp_path / "model.safetensors")
    code, out, _ = vllm_nixl("push", tmp_path, server.url, "http://127.0.0.1:9")
    assert code == 1
    assert "1 of 2 servers" in out
    assert "unreachable" in out
    server.expect(model(2))


def test_push_with_partial_sends_what_there_is(vllm_nixl, server, tmp_path) -> None:
    save_file({"norm": torch.ones(64)}, tmp_path / "some.safetensors")
    assert vllm_nixl("push", tmp_path, server.url)[0] == 1
    code, out, err = vllm_nixl("push", tmp_path, server.url, "--partial")
    assert (code, err) == (0, ""), out


@pytest.mark.parametrize(
    "args", [["push", "nowhere", "http://127.0.0.1:9"], ["push", ".", "localhost"], ["status", "localhost"]]
)
def test_mistakes_end_in_one_line_and_status_one(vllm_nixl, args, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = vllm_nixl(*args)
    assert (code, out) == (1, "")
    assert err.startswith("error: invalid_request: ")
    assert err.count("\n") == 1


def test_a_wrong_token_is_told_with_its_remedy(vllm_nixl, server, tmp_path) -> None:
    save_file(model(), tmp_path / "model.safetensors")
    (tmp_path / "token").write_text("wrong\n")
    code, out, _ = vllm_nixl("push", tmp_path, server.url, "--token-file", tmp_path / "token")
    assert code == 1
    assert "PUSH_WEIGHTS_TOKEN" in out


def test_status_pause_and_resume(vllm_nixl, server) -> None:
    code, out, _ = vllm_nixl("status", server.url)
    assert (code, out) == (0, f"{server.url}: serving, weights default, ready\n")
    assert vllm_nixl("pause", server.url, "--mode", "wait")[:2] == (0, f"{server.url}: paused\n")
    assert vllm_nixl("resume", server.url)[:2] == (0, f"{server.url}: resumed\n")
    code, out, _ = vllm_nixl("status", server.url, "http://127.0.0.1:9", "--json")
    answers = json.loads(out)
    assert code == 1
    assert answers[server.url]["state"] == "serving"
    assert answers["http://127.0.0.1:9"]["error"]["code"] == "unreachable"


def test_usage_mistakes_have_status_two(vllm_nixl) -> None:
    assert vllm_nixl("push")[0] == 2
    assert vllm_nixl("push", ".", "http://a", "--mode", "sideways")[0] == 2
