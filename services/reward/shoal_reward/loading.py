"""Imports the modules that hold scorers, and builds those of known kinds."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from shoal.config.reward_service import RewardServiceSettings
from shoal.errors import ConfigError
from shoal.reward import REGISTRY, Scorer
from shoal.types import ScorerDescription
from shoal_reward.kinds import build_scorer


def load_scorers(settings: RewardServiceSettings) -> None:
    """Register every scorer of a reward service in `shoal.reward.REGISTRY`.

    Raises: ConfigError: a module or definition cannot be used, or a name and version are taken.
    """
    load_modules(settings.modules)
    for name, definition in settings.scorers.items():
        REGISTRY.add(build_scorer(name, definition))


def describe(scorer: Scorer) -> ScorerDescription:
    """What others are told of a scorer."""
    return ScorerDescription(
        name=scorer.name,
        version=scorer.version,
        description=scorer.description,
        fingerprint=scorer.fingerprint,
        needs_token_ids=scorer.needs_token_ids,
    )


def load_modules(modules: Iterable[str]) -> None:
    """Import each module name or .py file, so that its `@reward` functions register.

    Raises: ConfigError: a module is missing or fails to import; names it and the error.
    """
    for module in modules:
        try:
            _load(module)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"reward.modules: cannot load {module!r}: {type(error).__name__}: {error}; "
                "give an importable module name or the path of a .py file, and see that it runs by itself"
            ) from error


def _load(module: str) -> ModuleType:
    if not module.endswith(".py"):
        return importlib.import_module(module)
    path = Path(module).expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    return _load_file(path)


def _load_file(path: Path) -> ModuleType:
    # The digest keeps two files of the same name apart.
    name = f"shoal_reward_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # As for a script: the file may import its neighbours.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:  # whatever the user's file raised, a half-loaded module must not be found later
        del sys.modules[name]
        raise
    return module
