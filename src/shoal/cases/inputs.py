"""A case's inputs as tensors and numbers of the case's dtype; everything wrong in them is a DataError that names the key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.errors import DataError

DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_NOT_NUMBERS = ("dtype", "kl_estimator", "bootstrap_on_truncation")
_SPECIAL = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Inputs of one case, or a nested part of them; a key with the value null counts as not given.

    asked: keys whose value something has asked for; see `check_unasked`.
    """

    values: Mapping[str, object]
    dtype: torch.dtype = torch.float64
    path: str = "inputs"
    asked: set[str] = field(default_factory=set, compare=False)

    def has(self, key: str) -> bool:
        """Whether the key is given."""
        return self.values.get(key) is not None

    def get(self, key: str) -> object:
        """The value as the file holds it.

        Raises: DataError: it is not given.
        """
        if not self.has(key):
            raise DataError(f"{self.path}.{key} is missing")
        self.asked.add(key)
        return self.values[key]

    def check_unasked(self) -> None:
        """What no expectation needed must still be numbers: a mistake in it would go unseen.

        Raises: DataError: naming the key.
        """
        for key, value in self.values.items():
            if value is None or key in self.asked or key in _NOT_NUMBERS:
                continue
            if isinstance(value, dict):
                raise DataError(f"{self.path}.{key} is used by nothing that is expected; expect something of it, or remove it")
            _numbers(value, f"{self.path}.{key}")

    def tensor(self, key: str, *, flags: bool = False) -> Tensor:
        """Nested lists of numbers as a tensor of the case's dtype; with `flags` also true and false.

        Raises: DataError: missing, ragged, or not numbers.
        """
        return to_tensor(self.get(key), self.dtype, f"{self.path}.{key}", flags=flags)

    def rows(self, key: str, *, flags: bool = False) -> Tensor:
        """The tensor as [B, T]; a plain list is one row, an empty one no row."""
        tensor = self.tensor(key, flags=flags)
        if tensor.ndim > 2:
            raise DataError(f"{self.path}.{key} has {tensor.ndim} levels; give a list, or a list of rows")
        if tensor.ndim == 2:
            return tensor
        return tensor.reshape(1, -1) if tensor.numel() else tensor.reshape(0, 0)

    def mask(self, key: str = "mask", *, like: Tensor | None = None) -> Tensor:
        """Zeros and ones as a bool tensor [B, T]; all True, of the shape of `like`, if it is not given and may be left out.

        Raises: DataError: missing without `like`, or holds something else.
        """
        if like is not None and not self.has(key):
            return torch.ones_like(like, dtype=torch.bool)
        rows = self.rows(key, flags=True)
        if not bool(((rows == 0) | (rows == 1)).all()):
            raise DataError(f"{self.path}.{key} holds other numbers than 0 and 1")
        return rows.bool()

    def vector(self, key: str, length: int) -> Tensor:
        """[length] numbers.

        Raises: DataError: another shape.
        """
        tensor = self.tensor(key)
        if tensor.shape != (length,):
            raise DataError(f"{self.path}.{key} has shape {list(tensor.shape)}; it needs one number for each of the {length} rows")
        return tensor

    def number(self, key: str, default: float | None = None) -> float:
        """A number, or the default where it is not given.

        Raises: DataError: missing without default, or not a number.
        """
        if default is not None and not self.has(key):
            return default
        return to_number(self.get(key), f"{self.path}.{key}")

    def integer(self, key: str) -> int:
        """A whole number.

        Raises: DataError: missing, or not whole.
        """
        value = self.get(key)
        if not to_number(value, f"{self.path}.{key}").is_integer():
            raise DataError(f"{self.path}.{key} is {value!r}; it must be a whole number")
        return int(value)  # type: ignore[call-overload, no-any-return]  # to_number refuses what int() would

    def integers(self, key: str) -> Tensor:
        """Nested lists of whole numbers as int64.

        Raises: DataError: missing, ragged, or not whole.
        """
        tensor = to_tensor(self.get(key), torch.float64, f"{self.path}.{key}")
        if not bool(((tensor == tensor.round()) & tensor.isfinite()).all()):
            raise DataError(f"{self.path}.{key} holds something else than whole numbers")
        return tensor.long()

    def flag(self, key: str, *, default: bool) -> bool:
        """A truth value."""
        self.asked.add(key)
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise DataError(f"{self.path}.{key} is {value!r}; it must be true or false")
        return value

    def choice(self, key: str, names: Iterable[str], default: str) -> str:
        """One of some names."""
        self.asked.add(key)
        value = self.values.get(key)
        valid = tuple(names)
        if value is None:
            return default
        if value not in valid:
            raise DataError(f"{self.path}.{key} is {value!r}; use one of {', '.join(valid)}")
        return str(value)

    def items(self, key: str) -> list[object]:
        """A list.

        Raises: DataError: missing, or something else.
        """
        value = self.get(key)
        if not isinstance(value, list):
            raise DataError(f"{self.path}.{key} is {value!r}; it must be a list")
        return value

    def part(self, key: str, value: object, *, required: Iterable[str], optional: Iterable[str] = ()) -> Inputs:
        """A nested object with known keys.

        Raises: DataError: not an object, a key is missing or unknown.
        """
        path = f"{self.path}.{key}"
        if not isinstance(value, dict):
            raise DataError(f"{path} is {value!r}; it must be an object")
        check_keys(value, required=required, optional=optional, what=f"{path}: input")
        return Inputs(values=value, dtype=self.dtype, path=path)

    def parts(self, key: str, *, required: Iterable[str]) -> list[Inputs]:
        """A list of nested objects with known keys."""
        return [self.part(f"{key}[{number}]", item, required=required) for number, item in enumerate(self.items(key))]


def check_keys(given: Mapping[str, object], *, required: Iterable[str], optional: Iterable[str], what: str) -> None:
    """Refuse unknown and missing keys.

    Raises: DataError: naming the key and the known ones.
    """
    needed = tuple(required)
    known = (*needed, *optional)
    for key in given:
        if key not in known:
            raise DataError(f"{what} key {key!r} is unknown; known are {', '.join(known)}")
    missing = [key for key in needed if given.get(key) is None]
    if missing:
        raise DataError(f"{what} key {missing[0]!r} is missing")


def to_number(value: object, where: str) -> float:
    """A number, or one of the texts nan, inf and -inf.

    Raises: DataError: anything else.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError as error:
            raise DataError(f"{where} is a whole number of {len(str(value))} digits; it must fit float64") from error
    if isinstance(value, str) and value in _SPECIAL:
        return _SPECIAL[value]
    raise DataError(f"{where} is {value!r}; it must be a number, 'nan', 'inf' or '-inf'")


def to_tensor(value: object, dtype: torch.dtype, where: str, *, flags: bool = False) -> Tensor:
    """Nested lists of numbers as a tensor; with `flags` true and false are 1 and 0.

    Raises: DataError: ragged, or not numbers.
    """
    try:
        return torch.tensor(_numbers(value, where, flags=flags), dtype=dtype)
    except (ValueError, TypeError) as error:
        raise DataError(f"{where} is ragged: all rows must be equally long ({error})") from error


def _numbers(value: object, where: str, *, flags: bool = False) -> object:
    if isinstance(value, list):
        return [_numbers(item, f"{where}[{number}]", flags=flags) for number, item in enumerate(value)]
    if flags and isinstance(value, bool):
        return float(value)
    return to_number(value, where)
