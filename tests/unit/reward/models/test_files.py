from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from shoal_reward.kinds import build_scorer

from shoal.config.reward_service import ScorerDefinition
from shoal.errors import ConfigError
from shoal.reward import Scorer
from tests.helpers.reward_models import save_reward_model


def _scorer(folder: Path, **settings: object) -> Scorer:
    return build_scorer("rm", ScorerDefinition(kind="model", settings={"model": str(folder), **settings}))


def test_the_fingerprint_tells_another_head_apart_and_nothing_else(tmp_path: Path) -> None:
    folder = save_reward_model(tmp_path, "llama")
    before = _scorer(folder).fingerprint
    (folder / "notes.md").write_text("irrelevant")
    assert _scorer(folder).fingerprint == before
    tensors = load_file(folder / "model.safetensors")
    tensors["score.weight"][0, -1] += 1.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert _scorer(folder).fingerprint != before
    assert _scorer(folder, scale=2.0).fingerprint != _scorer(folder).fingerprint


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = save_reward_model(tmp_path, "llama")
    shutil.move(folder / "model.safetensors", folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"has no \*.safetensors"):
        _scorer(folder)


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json cannot be read"):
        _scorer(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="holds list, not a JSON object"):
        _scorer(tmp_path)


@pytest.mark.parametrize("model", ["/no/such/folder", "./nowhere"])
def test_a_folder_that_is_not_there_is_named(model: str) -> None:
    with pytest.raises(ConfigError, match=f"model '{model}' is no folder"):
        build_scorer("rm", ScorerDefinition(kind="model", settings={"model": model}))


@pytest.mark.parametrize("content", [b"", b"\x10\0\0\0\0\0\0\0{}", b"\xff" * 8])
def test_weights_that_are_cut_off_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"id2label": {"0": "score"}}))
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="is cut off or no safetensors file"):
        _scorer(tmp_path)


def test_building_a_scorer_imports_no_torch(tmp_path: Path) -> None:
    folder = save_reward_model(tmp_path, "llama")
    program = (
        "import sys; from shoal_reward.kinds import build_scorer; from shoal.config.reward_service import ScorerDefinition\n"
        f"build_scorer('rm', ScorerDefinition(kind='model', settings={{'model': {str(folder)!r}}}))\n"
        "server = {'model': 'm', 'url': 'http://127.0.0.1:1'}\n"
        "build_scorer('rm', ScorerDefinition(kind='model_server', settings=server))\n"
        "build_scorer('rm', ScorerDefinition(kind='judge', settings={**server, 'rubric': '{response}'}))\n"
        "assert not {'torch', 'transformers', 'vllm'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_code_of_the_model_is_never_run(tmp_path: Path) -> None:
    folder = save_reward_model(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    own = {"auto_map": {"AutoConfig": "own.Config", "AutoModelForSequenceClassification": "own.Model"}, "model_type": "own"}
    (folder / "config.json").write_text(json.dumps({**config, **own}))
    prepare = _scorer(folder).prepare
    assert prepare is not None
    with pytest.raises(ConfigError, match="cannot be loaded"):
        prepare()
    assert not (tmp_path / "ran").exists()
