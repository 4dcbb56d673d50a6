"""mTLS: both sides prove who they are, and every missing file is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

from shoal.clients.reward import RewardClient
from shoal.config.models import SecuritySection
from shoal.errors import ConfigError, UnavailableError
from shoal.rpc.channel import open_channel
from shoal.rpc.health import is_serving
from shoal.rpc.server import RpcServer
from tests.helpers.certificates import issue
from tests.helpers.rpc_services import PLAINTEXT, REWARD_SERVICE, FakeReward, register_reward, serving


@pytest.fixture
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def security(tmp_path: Path, ca: trustme.CA) -> SecuritySection:
    return issue(tmp_path, "service", ca, ca)


async def test_mtls_call_and_health_pass_with_certificates_of_one_ca(security: SecuritySection) -> None:
    async with (
        serving(register_reward(FakeReward()), REWARD_SERVICE, security=security) as address,
        RewardClient(address, security) as client,
    ):
        assert (await client.describe(timeout_s=10))[0].name == "exact"
        assert await is_serving(address, security, timeout_s=10)


async def test_mtls_plaintext_client_is_refused(security: SecuritySection) -> None:
    async with (
        serving(register_reward(FakeReward()), REWARD_SERVICE, security=security) as address,
        RewardClient(address, PLAINTEXT) as client,
    ):
        with pytest.raises(UnavailableError):
            await client.describe(timeout_s=3)


async def test_mtls_client_of_another_ca_is_refused(security: SecuritySection, tmp_path: Path, ca: trustme.CA) -> None:
    # It trusts the server, but the server does not trust it.
    stranger = issue(tmp_path, "stranger", trustme.CA(), ca)
    async with (
        serving(register_reward(FakeReward()), REWARD_SERVICE, security=security) as address,
        RewardClient(address, stranger) as client,
    ):
        with pytest.raises(UnavailableError):
            await client.describe(timeout_s=3)


async def test_mtls_server_of_another_ca_is_refused(security: SecuritySection, tmp_path: Path, ca: trustme.CA) -> None:
    impostor = issue(tmp_path, "impostor", trustme.CA(), ca)
    async with (
        serving(register_reward(FakeReward()), REWARD_SERVICE, security=impostor) as address,
        RewardClient(address, security) as client,
    ):
        with pytest.raises(UnavailableError):
            await client.describe(timeout_s=3)


@pytest.mark.parametrize("field", ["ca_file", "cert_file", "key_file"])
async def test_mtls_missing_or_wrong_file_is_named(security: SecuritySection, field: str, tmp_path: Path) -> None:
    gone, text = tmp_path / "gone.pem", tmp_path / "text.pem"
    text.write_text("not a certificate")
    for value, message in ((str(gone), "gone.pem"), (str(text), "not PEM"), (None, "not set")):
        broken = security.model_copy(update={field: value})
        with pytest.raises(ConfigError, match=rf"security\.{field}.*{message}"):
            open_channel("127.0.0.1:1", broken)
        with pytest.raises(ConfigError, match=rf"security\.{field}.*{message}"):
            await RpcServer("127.0.0.1", 0, broken).start()
