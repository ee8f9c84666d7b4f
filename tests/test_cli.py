"""The command line pushes checkpoints over real sockets and NIXL, and its exit status tells the truth."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import save_file

from fake_server import TOKEN, FakeServer, model, reachable
from trainer_client.cli import main
from trainer_client.commands import output, plan, status
from trainer_client.commands.plan_page import plan_page
from vllm_nixl_plugin.pages import asset


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with reachable() as made:
        yield made


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
    assert code == 0
    assert [cell.strip() for cell in out.splitlines()[3].split("│")[1:5]] == [server.url, "serving", "default", "yes"]
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


def test_the_table_of_a_fleet_has_a_line_for_each_server_dead_ones_too(vllm_nixl, server, tmp_path) -> None:
    save_file(model(1), tmp_path / "model.safetensors")
    vllm_nixl("push", tmp_path, server.url, "--version", "v1")
    code, out, err = vllm_nixl("status", "http://127.0.0.1:9", server.url)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert (code, err) == (1, "")
    assert rows[0][:2] == ["http://127.0.0.1:9", "unreachable"]
    assert rows[1][:5] == [server.url, "serving", "v1", "yes", "i"]


def test_watching_prints_a_line_of_json_per_answer_until_it_is_interrupted(server) -> None:
    command = [
        sys.executable,
        "-m",
        "trainer_client.cli",
        "status",
        server.url,
        "--watch",
        "--interval-s",
        "0.1",
        "--json",
    ]
    environment = os.environ | {"PUSH_WEIGHTS_TOKEN": TOKEN}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout
        lines = [json.loads(watching.stdout.readline()) for _ in range(3)]
        watching.send_signal(signal.SIGINT)
        watching.stdout.read()
        assert watching.wait(30) == 0
    assert all(line[server.url]["state"] == "serving" for line in lines)


def test_a_lease_and_the_last_update_are_told_in_words() -> None:
    answer = {
        "state": "receiving", "ready": False, "reason": "busy [x]", "held": True, "weight_version": "v1",
        "incarnation": "0123456789", "lease": {"holder": "t", "expires_in_s": -2.0},
        "update": {"version": "v2", "nbytes": 200, "arrived_nbytes": 50},
        "last": {"version": "v1", "state": "failed", "error": {"code": "incomplete", "message": "1 of 2"},
                 "timings": {"wait_s": 1.0, "install.copy": 3.0, "total_s": 1.5}},
    }  # fmt: skip
    rows = [list(column.cells) for column in status.table({"http://a": answer}).columns]
    assert [row[0] for row in rows] == [
        "http://a", "[cyan]receiving, held v2 25 %[/]", "v1", "[yellow]no:[/] busy \\[x]", "01234567",
        "t, over for 2 s", "v1 failed 1.500 s (prepare 1.000): incomplete: 1 of 2",
    ]  # fmt: skip


def workers() -> list[dict]:
    """Plans of two workers: two layers that are alike, a third that is not, and a weight for the loader."""

    def one(name: str, home: str = "shadow", nbytes: int = 1000, reason: str = "") -> dict:
        return {"names": [name], "nbytes": nbytes, "home": home, "reason": reason, "received_nbytes": nbytes}

    destinations = [
        *(one(f"model.layers.{n}.up.weight", "live") for n in range(3)), one("model.layers.2.down.weight"),
        one("head.weight", "source", 500, "it </script> & <b>"),
    ]  # fmt: skip
    common = {"nbytes": 4500, "nbytes_by_home": {"live": 3000, "shadow": 1000, "source": 500}, "copies": 5,
              "unused": ["extra"], "fallback": ["head.weight"], "stale": ["draft"]}  # fmt: skip
    return [
        {"worker": n, "destinations": destinations, "streamed": {"smallest_budget_nbytes": 2000}} | common
        for n in (0, 1)
    ]


def test_a_plan_is_told_by_worker_and_by_module_and_like_layers_are_one_line(capsys) -> None:
    output.console().print(plan.by_worker(workers()))
    output.console().print(plan.tree(workers(), 4))
    out = capsys.readouterr().out
    assert "│ 1      │ 4.50 kB    │ 3.00 kB │ 1.00 kB │ 500 B    │ 5      │ 2.00 kB " in out
    assert "0 to 1 (2 alike, each)  2.00 kB, all live" in out
    assert "2  4.00 kB (live 2.00 kB, shadow 2.00 kB)" in out
    assert "head.weight" not in out
    assert "weight  1.00 kB, all fallback" in out
    assert list(plan.remarks(workers())) == [
        "not live, since", "     1.00 kB  it </script> & <b>",
        "fallback (vLLM's own loader runs on these): head.weight", "not used by the model: extra",
        "stale: draft (the plan has no weights for it)",
    ]  # fmt: skip


def test_the_page_of_a_plan_needs_nothing_else_and_no_name_can_leave_its_place() -> None:
    page = plan_page("http://a/<x>", workers())
    assert not re.search(r"""(?:src|href)\s*=|url\(|@import|//[a-z]""", page.replace("http://a/", ""))
    assert "</script> &" not in page
    assert "<title>plan of http://a/&lt;x&gt;</title>" in page
    [data] = re.findall(r"const plan = (.*);</script>", page)
    assert [leaf["worker"] for leaf in json.loads(data)["leaves"]] == [0] * 5 + [1] * 5
    assert json.loads(data)["reasons"] == ["", "it </script> & <b>"]


def test_the_script_of_the_page_parses_and_inserts_no_markup() -> None:
    from tree_sitter import Language, Parser
    from tree_sitter_javascript import language

    text = asset("plan.js")
    root = Parser(Language(language())).parse(text.encode()).root_node
    assert not root.has_error, [str(node) for node in root.children if node.has_error]
    assert not [word for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write") if word in text]
