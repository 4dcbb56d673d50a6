"""What all tests of swaps share: one Redis server, and one process that forks reward servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.push_matrix_cluster import Zygote
from tests.helpers.valkey import running_valkey


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    zygote = Zygote(tmp_path_factory.mktemp("zygote"), {"reward": "tests.helpers.swap_reward"})
    yield zygote
    zygote.close()


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_valkey(tmp_path_factory.mktemp("redis")) as server:
        yield server.url
