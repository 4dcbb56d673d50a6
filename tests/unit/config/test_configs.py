"""The configurations that ship with the project."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from shoal.config.load import load_config
from shoal.config.models import RunConfig

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
COMPOSE = ROOT / "configs" / "compose.yaml"
# Where things are, as opposed to how the run trains.
PLACES = {
    "run": {"id", "folder"},
    "model": {"path"},
    "data": {"train", "held_out"},
    "push": {"shm_dir"},
    "coordinator": {"host", "grpc_port", "rest_port", "ready_timeout_s"},
    "redis": {"url"},
    "telemetry": {"metrics_port"},
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads(path: Path) -> None:
    assert load_config(path).run.steps > 0


def test_compose_trains_as_the_arithmetic_preset_does() -> None:
    assert _training(load_config(COMPOSE)) == _training(load_config(ROOT / "configs" / "arithmetic.yaml"))


def test_compose_file_passes_what_its_config_says_and_the_same_to_all() -> None:
    config = load_config(COMPOSE)
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for name in ("rollout", "reward", "actor", "critic"):
        arguments = services[name]["command"]
        assert arguments[arguments.index("--coordinator") + 1] == f"coordinator:{config.coordinator.grpc_port}"
        assert arguments[arguments.index("--advertise") + 1] == name
        assert arguments[arguments.index("--port") + 1] == services[name]["healthcheck"]["test"][-1].rpartition(":")[2]
        assert arguments[: arguments.index("--service-id")][-4:] == services["coordinator"]["command"][2:6]
    assert f"run.steps=${{SHOAL_STEPS:-{config.run.steps}}}" in services["coordinator"]["command"]
    assert services["coordinator"]["ports"][0].endswith(f":{config.coordinator.rest_port}")
    for name in ("rollout", "actor"):
        assert f"shm:{config.push.shm_dir}" in services[name]["volumes"]


def _training(config: RunConfig) -> dict[str, dict[str, object]]:
    sections = config.model_dump()
    return {name: {key: value for key, value in fields.items() if key not in PLACES.get(name, ())} for name, fields in sections.items()}
