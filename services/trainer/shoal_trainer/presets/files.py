"""The files of a preset's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal_trainer.presets import PRESET_VERSION

PRESET_FILE = "preset.json"


def write_preset(
    out: Path,
    *,
    name: str,
    seed: int,
    train: Sequence[Mapping[str, object]],
    held_out: Sequence[Mapping[str, object]],
    facts: Mapping[str, object],
) -> dict[str, object]:
    """Write the rows and, last and atomically, preset.json; return what preset.json holds.

    Args:
        out: the preset's folder.
        facts: what the builder measured.
    """
    write_jsonl(out / "train.jsonl", train)
    write_jsonl(out / "held_out.jsonl", held_out)
    preset = {
        "name": name,
        "version": PRESET_VERSION,
        "seed": seed,
        "num_train": len(train),
        "num_held_out": len(held_out),
        **facts,
    }
    part = out / f"{PRESET_FILE}.part"
    part.write_text(json.dumps(preset, indent=2) + "\n", encoding="utf-8")
    os.replace(part, out / PRESET_FILE)
    return preset


def save_folder(model: Any, tokenizer: Any, folder: Path) -> None:  # noqa: ANN401 - transformers ships no usable types
    """Save safetensors, configuration, generation defaults and tokenizer as one Hugging Face folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # safetensors creates files that only their owner can read; services may run as other users.
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)


def write_jsonl(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write one JSON object a line; creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def read_complete(out: Path, *, name: str, seed: int) -> dict[str, Any] | None:
    """Return preset.json of a complete folder of the same preset, seed and version; None if there is none."""
    try:
        preset = json.loads((out / PRESET_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    wanted = {"name": name, "version": PRESET_VERSION, "seed": seed}
    if not isinstance(preset, dict) or any(preset.get(key) != value for key, value in wanted.items()):
        return None
    return preset
