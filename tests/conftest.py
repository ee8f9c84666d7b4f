"""Fixtures and rules of the whole test suite."""

import signal
from collections.abc import Callable, Generator
from pathlib import Path

import hypothesis
import pytest

from harness import Server, close_launcher

# Machines are shared: how long an example takes says nothing.
hypothesis.settings.register_profile("shared-machine", deadline=None, print_blob=True)
hypothesis.settings.load_profile("shared-machine")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """checkpoint(name, seed=1): the folder of a tiny random checkpoint (harness.checkpoints.MODELS), written once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def written(name: str, seed: int = 1) -> Path:
        from harness.checkpoints import write_checkpoint

        path = root / f"{name}-{seed}"
        return path if path.exists() else write_checkpoint(path, name, seed)

    return written


def pytest_configure() -> None:
    """A shell has what it runs in the background ignore Ctrl-C, and so would all processes of the tests."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked `gpu`, unless the -m expression says something about them."""
    if "gpu" in config.option.markexpr:
        return
    deselected = [item for item in items if item.get_closest_marker("gpu")]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in deselected]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the output of the servers that run while a test fails."""
    report = yield
    if report.failed:
        for server in Server.running:
            report.sections.append((f"server {server.url} ({item.name})", server.log_tail()))
    return report


def pytest_unconfigure() -> None:
    """Leave no process behind."""
    close_launcher()
