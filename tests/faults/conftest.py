"""The servers and trainers that all tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from faults.runner import World


@pytest.fixture(scope="package")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("faults")) as made:
        yield made
