"""The reward service's command line: three ways to say what to serve, and when plaintext is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from shoal_reward.kinds import build_scorer
from shoal_reward.startup import Startup, parser, startup_of

from shoal.config.reward_service import RewardServiceSettings, build_reward_service
from shoal.errors import ConfigError


def startup(*arguments: str) -> Startup:
    return startup_of(parser().parse_args(arguments))


def test_startup_of_a_run_takes_its_file_modules_scorers_and_security(tmp_path: Path) -> None:
    (tmp_path / "service.yaml").write_text("modules: [first]\nworkers: 3\n")
    reward = {"scorer": "mine", "version": "2", "modules": ["first", "second"], "service_file": str(tmp_path / "service.yaml")}
    config = {"run": {"id": "a-run", "folder": "f"}, "model": {"path": "m"}, "data": {"train": "d"}, "reward": reward}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    found = startup("--config", str(tmp_path / "run.yaml"), "--service-id", "reward-0", "--set", "telemetry.metrics_port=9400")
    assert (found.run_id, found.service_id, found.settings.modules, found.settings.workers) == ("a-run", "reward-0", ("first", "second"), 3)
    assert dict(found.wanted) == {"mine": "2"}
    assert found.telemetry.metrics_port == 9400


def test_startup_without_a_run_adds_modules_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text("modules: [first]\nscorers:\n  boxed: {kind: exact}\n")
    found = startup("--serve", str(file), "--module", "second", "--module", "second", "--module", "first", "--metrics-port", "-1")
    assert found.settings.modules == ("first", "second")
    assert list(found.settings.scorers) == ["boxed"]
    assert (found.run_id, found.telemetry.metrics_port, dict(found.wanted), found.security.insecure) == ("", -1, {}, True)
    assert found.service_id.startswith("reward-")


def test_startup_of_modules_alone_keeps_the_built_in_scorers() -> None:
    assert startup("--module", "mine").settings.modules == ("shoal_reward.builtin", "mine")


PEM = ["--ca-file", "ca.pem", "--cert-file", "cert.pem", "--key-file", "key.pem"]


def test_startup_takes_mtls_or_explicit_plaintext_beyond_this_machine() -> None:
    secure = startup("--module", "m", "--host", "10.0.0.1", *PEM).security
    assert (secure.insecure, secure.ca_file, secure.cert_file, secure.key_file) == (False, "ca.pem", "cert.pem", "key.pem")
    assert startup("--module", "m", "--host", "10.0.0.1", "--insecure").security.insecure
    for host in ("127.0.0.1", "::1", "localhost"):
        assert startup("--module", "m", "--host", host).security.insecure


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to serve: give --config RUN.yaml, --serve FILE.yaml, or --module"),
        (["--serve", "missing.yaml"], "missing.yaml does not exist"),
        (["--serve", "missing.yaml", "--config", "run.yaml"], "instead of --serve and --module"),
        (["--module", "m", "--set", "reward.scorer=x"], "--set changes a run's configuration"),
        (["--module", "m", "--host", "10.0.0.1"], "10.0.0.1 is beyond this machine"),
        (["--module", "m", "--coordinator", "far.example:7000"], "far.example is beyond this machine"),
        (["--module", "m", "--coordinator", "nowhere"], "'nowhere' is not host:port"),
        (["--module", "m", "--ca-file", "ca.pem"], "--cert-file, --key-file is missing"),
        (["--module", "m", "--insecure", *PEM], "leave out either it or the PEM files"),
        (["--module", "m", "--metrics-port", "70000"], "--metrics-port 70000 is no port"),
    ],
)
def test_startup_refuses_what_cannot_be_served(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        startup(*arguments)
    assert message in str(error.value)


@pytest.mark.parametrize("port", ["70000", "-1", "65536", "8e3", "٥", "9" * 5000])
def test_startup_refuses_a_number_that_is_no_port(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    """gRPC would listen on what is left of it without its upper bits."""
    with pytest.raises(SystemExit):
        startup("--module", "m", f"--port={port}")
    assert "is no port; give a number from 0 to 65535" in capsys.readouterr().err


def test_readme_shows_a_file_that_can_be_served() -> None:
    readme = Path(__file__).parents[3] / "services" / "reward" / "README.md"
    (shown,) = re.findall(r"```yaml\n(modules:.*?)```", readme.read_text(), re.DOTALL)
    settings = build_reward_service(yaml.safe_load(shown), source="README")
    assert [build_scorer(name, definition).name for name, definition in settings.scorers.items()] == ["boxed", "brief_answer"]
    assert settings == RewardServiceSettings(modules=settings.modules, scorers=settings.scorers, workers=4)
