"""Policies and data that `shoal demo` can train without a download from a hub.

`python -m shoal_trainer.presets NAME --out DIR --seed S` writes

    DIR/model/           Hugging Face folder (config, safetensors, tokenizer)
    DIR/train.jsonl      one row a line: prompt, answer, ...
    DIR/held_out.jsonl   rows that are never trained on
    DIR/preset.json      name, version, seed, and what the builder measured

preset.json is written last, so a folder that has it is complete. Run settings that suit a preset are in configs/NAME.yaml.
Importing this package costs nothing; torch is loaded by the builders only.
"""

from __future__ import annotations

PRESET_VERSION = 3
"""Part of every cache key; raised whenever a builder would write something else for the same seed."""

PRESET_NAMES = ("arithmetic", "smollm2")
