"""Settings come from one catalogue: what is wrong in the environment is named, and ends the start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_client import WeightClient
from trainer_client.environment import read_token
from vllm_nixl_plugin import settings
from vllm_nixl_plugin.errors import InvalidRequest
from vllm_nixl_plugin.settings import InvalidSettings, ServerSettings, TrainerSettings, WorkerSettings

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PUSH_WEIGHTS_")]:
        monkeypatch.delenv(name)


def test_an_environment_without_settings_is_valid_for_both_sides() -> None:
    assert settings.problems(ServerSettings) == settings.problems(TrainerSettings) == []


def test_what_kubernetes_says_of_a_service_of_our_name_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_80_TCP_ADDR", "A_SERVICE_HOST"):
        monkeypatch.setenv(f"PUSH_WEIGHTS_{name}", "10.0.0.1")
    monkeypatch.setenv("PUSH_WEIGHTS_PORT", "tcp://10.0.0.1:80")
    assert settings.problems(ServerSettings) == []
    monkeypatch.setenv("PUSH_WEIGHTS_PORT", "8100")
    assert len(settings.problems(ServerSettings)) == 1


def test_values_are_read_in_the_form_that_the_documentation_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "INTERFACES": "mlx5_0:1, eth0", "BACKEND_PARAMS": "a=1,b=x=y", "NUM_THREADS": "3", "SHADOW": "host",
        "SELF_CHECK": "", "ADDRESS": "[::1]:8100", "READY_AFTER_PUSH": "1", "TOKEN": "one\ntwo",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(f"PUSH_WEIGHTS_{name}", value)
    found = settings.server()
    assert (found.interfaces, found.backend_params) == (("mlx5_0:1", "eth0"), {"a": "1", "b": "x=y"})
    assert (found.num_threads, found.shadow, found.self_check, found.backend) == (3, "host", "sample", "UCX")
    assert (found.address, found.ready_after_push) == (("::1", 8100), True)
    assert WorkerSettings().shadow == "host"
    assert "two" not in repr(found)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PUSH_WEIGHTS_TOKN_FILE", "x", "PUSH_WEIGHTS_TOKN_FILE is no setting: did you mean PUSH_WEIGHTS_TOKEN_FILE?"),
        ("PUSH_WEIGHTS_INTERFACE", "lo", "did you mean PUSH_WEIGHTS_INTERFACES?"),
        ("PUSH_WEIGHTS_QQQQQQQQQQ", "x", "is no setting: there are PUSH_WEIGHTS_ADDRESS, "),
        ("PUSH_WEIGHTS_SHADOW", "gpu", "PUSH_WEIGHTS_SHADOW is 'gpu': set it to auto, device or host"),
        ("PUSH_WEIGHTS_ALLOW_ANONYMOUS", "maybe", "PUSH_WEIGHTS_ALLOW_ANONYMOUS is 'maybe': set it to 1 or 0"),
        ("PUSH_WEIGHTS_NUM_THREADS", "few", "PUSH_WEIGHTS_NUM_THREADS is 'few': "),
        ("PUSH_WEIGHTS_NUM_THREADS", "-1", "PUSH_WEIGHTS_NUM_THREADS is '-1': "),
        ("PUSH_WEIGHTS_BACKEND_PARAMS", "a=1,b", "expected name=value,name=value; 'b' has no ="),
        ("PUSH_WEIGHTS_ADDRESS", "8100", "PUSH_WEIGHTS_ADDRESS is '8100': expected host:port"),
        ("PUSH_WEIGHTS_BACKEND", "GDS", "accept that with PUSH_WEIGHTS_INTERFACES=all"),
    ],
)
def test_a_wrong_setting_of_the_server_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv("PUSH_WEIGHTS_TOKEN", "a-token-of-some-length")
    settings.check_startup()
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidSettings) as refused:
        settings.check_startup()
    assert said in str(refused.value)
    assert len(refused.value.problems) == 1


def test_all_that_is_wrong_is_told_at_once_and_no_secret_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUSH_WEIGHTS_TOKEN", "a-secret-token")
    monkeypatch.setenv("PUSH_WEIGHTS_ALLOW_ANONYMOUS", "1")
    assert settings.problems(ServerSettings) == [
        "PUSH_WEIGHTS_ALLOW_ANONYMOUS=1 says that no token is needed, and PUSH_WEIGHTS_TOKEN is set: unset one of them"
    ]
    monkeypatch.setenv("PUSH_WEIGHTS_SHADOW", "gpu")
    monkeypatch.setenv("PUSH_WEIGHTS_NUM_THREADS", "few")
    monkeypatch.setenv("PUSH_WEIGHTS_TOKENS", "x")
    found = settings.problems(ServerSettings)
    assert [line.split(" is ")[0].removeprefix("PUSH_WEIGHTS_") for line in found] == [
        "TOKENS",
        "NUM_THREADS",
        "SHADOW",
    ]
    assert "a-secret-token" not in "".join(found)


def test_a_trainer_refuses_what_is_wrong_too_and_takes_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PUSH_WEIGHTS_TOKEN", " of-the-environment ")
    assert read_token() == "of-the-environment"
    (tmp_path / "token").write_text("\nof-the-file\nolder\n")
    monkeypatch.setenv("PUSH_WEIGHTS_TOKEN_FILE", str(tmp_path / "token"))
    assert read_token() == "of-the-file"
    monkeypatch.setenv("PUSH_WEIGHTS_KEY_FILE", str(tmp_path / "key"))
    with pytest.raises(InvalidRequest, match="PUSH_WEIGHTS_CERT_FILE, which is not set"):
        WeightClient(["http://localhost:1"])
    monkeypatch.delenv("PUSH_WEIGHTS_KEY_FILE")
    monkeypatch.setenv("PUSH_WEIGHTS_TIMEOUT", "3")
    with pytest.raises(InvalidRequest, match="PUSH_WEIGHTS_TIMEOUT is no setting"):
        WeightClient(["http://localhost:1"])


def test_the_pages_of_settings_and_commands_are_what_the_code_says() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/make_docs.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
