"""Checkpoint headers become meta tensors; what cannot be read or pushed is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from shoal_rollout.checkpoint_shapes import meta_checkpoint, read_tensors

from shoal.errors import ConfigError


def test_meta_checkpoint_reads_all_shards_without_data(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 5)}, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"b": torch.zeros(2, dtype=torch.bfloat16), "c": torch.zeros(())}, tmp_path / "model-2.safetensors")
    tensors = meta_checkpoint(tmp_path)
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()} == {
        "a": ((3, 5), torch.float32),
        "b": ((2,), torch.bfloat16),
        "c": ((), torch.float32),
    }
    assert all(tensor.is_meta for tensor in tensors.values())


def test_meta_checkpoint_refuses_folders_without_safetensors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no \.safetensors file"):
        meta_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x01\x02", struct.pack("<Q", 1 << 60), struct.pack("<Q", 50) + b"{"])
def test_meta_checkpoint_refuses_damaged_headers(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="cannot read the safetensors header"):
        meta_checkpoint(tmp_path)


def test_meta_checkpoint_refuses_dtypes_that_no_push_carries(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    with pytest.raises(ConfigError, match=r"tensor w .* has dtype F8_E4M3"):
        meta_checkpoint(tmp_path)


def test_checkpoint_follows_the_index_where_there_is_one(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "model-2.safetensors")
    save_file({"a": torch.zeros(3)}, tmp_path / "consolidated.safetensors")
    with pytest.raises(ConfigError, match=r"tensor a is in .*model-1.* and in another file"):
        meta_checkpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    assert meta_checkpoint(tmp_path).keys() == {"a", "b"}
    assert {name: tensor.tolist() for name, tensor in read_tensors(tmp_path)} == {"a": [1, 1, 1], "b": [1, 1]}


@pytest.mark.parametrize(
    ("index", "why"),
    [("{", "cannot read"), ("[]", "cannot read"), ('{"weight_map": {"a": "model-2.safetensors"}}', r"lacks model-2\.safetensors")],
)
def test_checkpoint_refuses_an_index_that_does_not_fit(tmp_path: Path, index: str, why: str) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "model-1.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=why):
        meta_checkpoint(tmp_path)
