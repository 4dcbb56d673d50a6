"""What one reward service runs: a YAML file of its own, since the service may be deployed without the run's configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from shoal.config.base import Section
from shoal.config.explain import explain, shortened
from shoal.config.models import RewardSection
from shoal.config.yaml_files import read_mapping
from shoal.errors import ConfigError


class ScorerDefinition(Section):
    """A scorer of a known kind with settings of its own; the kinds and their settings are those of `shoal_reward.kinds`."""

    kind: str
    """What it is: math, exact, regex, choice, json_schema, format, length, code, reasoning_gym, model, model_server or judge."""
    version: str = "1"
    """Raise it with every change that can alter a score."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the kind."""


class RewardServiceSettings(Section):
    """What a reward service loads, and the limits of its graders."""

    modules: tuple[str, ...] = ("shoal_reward.builtin",)
    """Modules or .py files with @reward functions."""
    scorers: dict[str, ScorerDefinition] = Field(default_factory=dict)
    """Name -> scorer of a known kind."""
    workers: int | None = Field(default=None, ge=1, le=1024)
    """Processes that grade; None is one per CPU core, 4 at most."""
    sample_timeout_s: float = Field(default=10.0, gt=0)
    """A grader that works longer on one sample is killed; the sample is an error."""
    prepare_timeout_s: float = Field(default=120.0, gt=0)
    """A grader that needs longer to load its modules is killed."""
    worker_memory_bytes: int = Field(default=4 << 30, ge=64 << 20)
    """Address space of a grader, in bytes; what it allocates beyond is an error of the sample."""


def load_reward_service(path: str | os.PathLike[str]) -> RewardServiceSettings:
    """Read a reward service's file.

    Raises: ConfigError: it cannot be read or used; says which settings.
    """
    tree = read_mapping(Path(path), what="reward service's file", holds="a mapping with sections such as modules: and scorers:")
    return build_reward_service(tree, source=str(path))


def reward_service_of(config: RewardSection) -> RewardServiceSettings:
    """What the reward service of a run's configuration loads.

    Raises: ConfigError: reward.service_file cannot be used.
    """
    settings = RewardServiceSettings() if config.service_file is None else load_reward_service(config.service_file)
    added = tuple(module for module in config.modules if module not in settings.modules)
    return settings.model_copy(update={"modules": (*settings.modules, *added)})


def build_reward_service(tree: Mapping[str, object], *, source: str) -> RewardServiceSettings:
    """Validate settings; source is what messages name.

    Raises: ConfigError: says which settings.
    """
    try:
        return RewardServiceSettings.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{source} cannot be used: {shortened(explain(error, RewardServiceSettings))}") from None
