"""Random inputs of numeric cases, as lists that JSON holds."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]
Rng: TypeAlias = np.random.Generator

GARBAGE = (100.0, -1e30, float("nan"), float("inf"), float("-inf"))


def encoded(value: Any) -> Any:  # noqa: ANN401 - nested lists of any depth
    """Arrays and nested containers as JSON's; nan and infinities as texts, truth values of a mask as 0 and 1."""
    if isinstance(value, dict):
        return {key: encoded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encoded(item) for item in value]
    if isinstance(value, np.ndarray):
        return encoded(value.astype(int).tolist() if value.dtype == bool else value.tolist())
    if isinstance(value, np.generic):
        return encoded(value.item())
    if isinstance(value, float) and not np.isfinite(value):
        return {"nan": "nan", "inf": "inf", "-inf": "-inf"}[str(value)]
    return value


def random_shape(rng: Rng) -> tuple[int, int]:
    """[B, T] of a small batch."""
    return int(rng.integers(1, 5)), int(rng.integers(1, 8))


def random_mask(rng: Rng, shape: tuple[int, ...]) -> Bools:
    """With holes, padding, and now and then a row without any token."""
    return np.asarray(rng.random(shape) < rng.choice([0.5, 0.8, 1.0]))


def dirty(rng: Rng, values: Floats, mask: Bools) -> Floats:
    """Values with garbage where masked."""
    return np.where(mask, values, rng.choice(GARBAGE, values.shape))


def singles(values: Floats) -> Floats:
    """Values that float32 holds exactly."""
    return values.astype(np.float32).astype(np.float64)


def random_uids(rng: Rng, size: int) -> list[str]:
    """Interleaved groups with names of any form."""
    names = ["a", "7", "group b", "z-1", "é"][: int(rng.integers(1, 5))]
    return [str(name) for name in rng.choice(names, size)]
