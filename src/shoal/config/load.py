"""Read a run's YAML file with `--set a.b=c` overrides into a checked RunConfig, and write it back.

Every refusal is a ConfigError that says what, which value, and what to do; secrets in values are masked.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from pydantic import ValidationError

from shoal.config.checks import check_config, resolve_config
from shoal.config.effects import settings_without_effect
from shoal.config.explain import explain, kind_of, required_keys
from shoal.config.masking import mask_url
from shoal.config.models import RunConfig
from shoal.config.yaml_files import StrictLoader, read_mapping, yaml_problem
from shoal.errors import ConfigError

_Tree: TypeAlias = dict[str, Any]


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Read, override, validate and check a configuration.

    Args:
        path: YAML file with the sections of RunConfig.
        overrides: "section.field=value", in order; the value is parsed as YAML.
    Raises: ConfigError: the file or an override cannot be used; all problems are listed, one a line.
    """
    return build_config(_read_tree(path, overrides), source=_source(path, overrides))


def load_preset(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """As `load_config`, but what the file sets gives way where the overrides leave it without effect: a preset is a suggestion.

    Raises: ConfigError: as load_config.
    """
    tree = _read_tree(path, overrides)
    chosen = [override.partition("=")[0].strip() for override in overrides]
    for setting in _idle_settings(tree):
        section, _, field = setting.partition(".")
        if any(name == setting or name.startswith(f"{setting}.") for name in chosen) or not isinstance(tree.get(section), dict):
            continue
        if field:
            tree[section].pop(field, None)
        else:
            del tree[section]
    return build_config(tree, source=_source(path, overrides))


def _read_tree(path: str | os.PathLike[str], overrides: Sequence[str]) -> _Tree:
    holds = f"a mapping of sections such as 'run:' and 'model:', at least {', '.join(required_keys(RunConfig))}"
    tree = read_mapping(Path(path), what="configuration", holds=holds)
    for override in overrides:
        _apply_override(tree, override)
    return tree


def _source(path: str | os.PathLike[str], overrides: Sequence[str]) -> str:
    """What messages name: what is wrong may stand in either."""
    return f"{path} with --set" if overrides else str(path)


def _idle_settings(tree: _Tree) -> list[str]:
    """Settings without effect; none where the tree is no configuration, which is said later."""
    try:
        config = RunConfig.model_validate(_sections(tree))
    except ValidationError:
        return []
    return [idle.setting for idle in settings_without_effect(config)]


def _sections(tree: Mapping[str, object]) -> _Tree:
    """A section with all of its lines commented out is the same as none."""
    return {name: {} if section is None and name in RunConfig.model_fields else section for name, section in tree.items()}


def build_config(tree: Mapping[str, object], *, source: str = "configuration") -> RunConfig:
    """Validate and check a nested mapping, as a YAML file holds it.

    Raises: ConfigError: as load_config; the message starts with `source`.
    """
    try:
        config = RunConfig.model_validate(_sections(tree))
        check_config(config)
    except ValidationError as error:
        lines = explain(error)
        raise ConfigError(_joined(source, lines)) from None
    except ConfigError as error:
        raise ConfigError(_joined(source, str(error).splitlines())) from None
    return resolve_config(config)


def dump_config(config: RunConfig, path: str | os.PathLike[str]) -> None:
    """Write every field as YAML, atomically; only the owner may read it, since redis.url may hold a password.

    Raises: ConfigError: the folder cannot be written.
    """
    target = Path(path)
    text = yaml.safe_dump(resolve_config(config).model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise ConfigError(f"cannot write {target} ({error.strerror}); check the folder and its permissions") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(target)
    except BaseException:  # interrupted too: no temporary file with a password is left
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise


def _apply_override(tree: _Tree, override: str) -> None:
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {mask_url(override)!r} is not section.field=value; write for example --set run.steps=10")
    try:
        value = yaml.load(text, Loader=StrictLoader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {dotted}: the value is not YAML ({yaml_problem(error)}); quote it") from None
    node = tree
    for depth, key in enumerate(keys[:-1]):
        child = node.setdefault(key, {})
        if child is None:
            child = node[key] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"--set {dotted}: {'.'.join(keys[: depth + 1])} is not a section but {kind_of(child)}; check the name")
        node = child
    node[keys[-1]] = value


def _joined(source: str, lines: Sequence[str]) -> str:
    return f"{source}: {lines[0]}" if len(lines) == 1 else f"{source} has {len(lines)} problems:\n  " + "\n  ".join(lines)
