"""Preparing a preset's model and data once, in the user's cache."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ConfigError, DataError

_PACKAGE = "shoal_trainer.presets"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPreset:
    """Where a preset's files are; cached tells whether preparing was skipped."""

    folder: Path
    cached: bool

    @property
    def model(self) -> Path:
        """Hugging Face folder of the policy."""
        return self.folder / "model"

    @property
    def train(self) -> Path:
        """Training rows."""
        return self.folder / "train.jsonl"

    @property
    def held_out(self) -> Path:
        """Evaluation rows."""
        return self.folder / "held_out.jsonl"


def cache_folder() -> Path:
    """SHOAL_CACHE, else shoal/ in the user's cache folder."""
    if configured := os.environ.get("SHOAL_CACHE"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))) / "shoal"


def prepare_preset(name: str, seed: int) -> PreparedPreset:
    """Make the preset's model and data, or find them in the cache.

    The cache key covers the code that makes them, so a changed preset is made anew. A half-made one is never found:
    the folder is renamed into place at the end.

    Raises: DataError: preparing failed; its output is on the terminal.
    """
    folder = cache_folder() / "presets" / f"{name}-seed{seed}-{_source_digest()}"
    if (folder / "preset.json").exists():
        return PreparedPreset(folder=folder, cached=True)
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    argv = [sys.executable, "-m", _PACKAGE, name, "--out", str(partial), "--seed", str(seed)]
    try:
        done = subprocess.run(argv, env={**os.environ, "SHOAL_SUPERVISED": "1", "TQDM_DISABLE": "1"}, check=False)  # noqa: S603 - our own module
        if done.returncode != 0:
            raise DataError(f"preparing preset {name!r} ended with code {done.returncode}; its last lines above say why")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return PreparedPreset(folder=folder, cached=False)


def _source_digest() -> str:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.submodule_search_locations is None:
        raise ConfigError("presets need the trainer: install shoal-rl[trainer]")
    digest = hashlib.sha256()
    for location in spec.submodule_search_locations:
        for path in sorted(Path(location).glob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]
