"""The files of a preset."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shoal_reward.loading import load_modules
from shoal_trainer.presets import PRESET_NAMES, PRESET_VERSION
from shoal_trainer.presets.files import read_complete, write_preset

from shoal.config.load import load_config
from shoal.reward import REGISTRY

CONFIGS = Path(__file__).parents[3] / "configs"


def write(out: Path, seed: int = 1) -> dict[str, object]:
    row = {"prompt": "1+1=", "answer": "2"}
    return write_preset(out, name="arithmetic", seed=seed, train=[row, row], held_out=[row], facts={"seconds": 1.0})


def test_write_preset_writes_rows_and_facts(tmp_path: Path) -> None:
    preset = write(tmp_path)
    assert json.loads((tmp_path / "preset.json").read_text()) == preset
    assert preset["version"] == PRESET_VERSION
    assert (preset["num_train"], preset["num_held_out"], preset["seconds"]) == (2, 1, 1.0)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert rows == [{"prompt": "1+1=", "answer": "2"}] * 2
    assert not list(tmp_path.glob("*.part"))


def test_read_complete_knows_the_same_preset_seed_and_version_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_complete(tmp_path, name="arithmetic", seed=1) is None
    preset = write(tmp_path)
    assert read_complete(tmp_path, name="arithmetic", seed=1) == preset
    assert read_complete(tmp_path, name="arithmetic", seed=2) is None
    assert read_complete(tmp_path, name="smollm2", seed=1) is None
    monkeypatch.setattr("shoal_trainer.presets.files.PRESET_VERSION", PRESET_VERSION + 1)
    assert read_complete(tmp_path, name="arithmetic", seed=1) is None


def test_read_complete_takes_a_cut_off_file_for_nothing(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "preset.json").write_text('{"name": "arith')
    assert read_complete(tmp_path, name="arithmetic", seed=1) is None


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_configs_suit_their_preset(name: str) -> None:
    config = load_config(CONFIGS / f"{name}.yaml", [])
    assert config.run.id == name
    load_modules(config.reward.modules)
    assert REGISTRY.get(config.reward.scorer, config.reward.version)
