"""Trainer ranks' side of the queue: read records, write and read columns, straight between Redis and the rank.

Legend: T response tokens of one record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from shoal.codec.experience import record_from_bytes
from shoal.codec.tensor import tensor_from_bytes, tensor_to_bytes
from shoal.errors import CodecError, InvalidRequestError, NotFoundError
from shoal.queue import keys
from shoal.queue.connection import open_sync, translated
from shoal.types import ExperienceRecord, Float32Array

MAX_KEYS_PER_CALL = 512
"""Bounds the size of one request and of one reply."""

# A column of a record that is gone must not bring its key back. KEYS: records; ARGV: column, then a value per record.
_WRITE_SCRIPT = """
for i = 1, #KEYS do if redis.call('EXISTS', KEYS[i]) == 0 then return i end end
for i = 1, #KEYS do redis.call('HSET', KEYS[i], ARGV[1], ARGV[i + 1]) end
return 0
"""


class RecordReader:
    """Reads records and moves columns of one run; connects on first use. Not for use from several threads.

    Args:
        url: Redis address.
        run_id: keys of other runs are refused.
    Raises: ConfigError: the url is not a Redis address.
    """

    def __init__(self, url: str, run_id: str) -> None:
        self._url = url
        self._prefix = keys.run_prefix(run_id)
        self._redis = open_sync(url)
        self._write = self._redis.register_script(_WRITE_SCRIPT)

    def fetch(self, record_keys: Sequence[str]) -> list[ExperienceRecord]:
        """Read records in the order of their keys.

        Raises:
            NotFoundError: a record is not there (acknowledged already, or never added).
            CodecError: the bytes are no record of a known schema version.
            UnavailableError: Redis cannot be reached.
        """
        return [record_from_bytes(value) for value in self._read(keys.RECORD_FIELD, record_keys)]

    def write_columns(self, name: str, columns: Mapping[str, Float32Array]) -> None:
        """Write one column of several records; writing again replaces it.

        Args:
            name: column, such as "values".
            columns: [T] float32 for each record key.
        Raises:
            NotFoundError: a record is not there; of its chunk of 512 nothing is written.
            UnavailableError: Redis cannot be reached.
        """
        self._check_column(name)
        for chunk in self._chunks(list(columns)):
            values = [tensor_to_bytes(columns[key]) for key in chunk]
            with translated(self._url, f"writing column {name!r}"):
                missing = int(cast("Any", self._write(keys=list(chunk), args=[name, *values])))
            if missing:
                raise NotFoundError(
                    f"record {chunk[missing - 1]!r} is gone, its column {name!r} was not written: was it acknowledged already?"
                )

    def read_column(self, name: str, record_keys: Sequence[str]) -> list[Float32Array]:
        """Read one column of several records.

        Returns: [T] float32 for each key, in their order.
        Raises:
            NotFoundError: a record or its column is not there.
            CodecError: the bytes are no float32 vector.
            UnavailableError: Redis cannot be reached.
        """
        self._check_column(name)
        values = self._read(name, record_keys)
        return [_as_vector(value, name, key) for value, key in zip(values, record_keys, strict=True)]

    def close(self) -> None:
        """Close the connection."""
        self._redis.close()

    def _read(self, field: str, record_keys: Sequence[str]) -> list[bytes]:
        values: list[bytes | None] = []
        for chunk in self._chunks(record_keys):
            with translated(self._url, f"reading {field!r} of {len(chunk)} records"), self._redis.pipeline(transaction=False) as pipe:
                for key in chunk:
                    pipe.hget(key, field)
                values += pipe.execute()
        for key, value in zip(record_keys, values, strict=True):
            if value is None:
                raise NotFoundError(f"{field!r} of record {key!r} is not in Redis: it was never written, or the record was acknowledged")
        return cast("list[bytes]", values)

    def _chunks(self, record_keys: Sequence[str]) -> Iterator[Sequence[str]]:
        for key in record_keys:
            if not key.startswith(self._prefix):
                raise InvalidRequestError(f"key {key!r} is not of this run: it should start with {self._prefix!r}")
        for start in range(0, len(record_keys), MAX_KEYS_PER_CALL):
            yield record_keys[start : start + MAX_KEYS_PER_CALL]

    @staticmethod
    def _check_column(name: str) -> None:
        if name == keys.RECORD_FIELD:
            raise InvalidRequestError(f"{name!r} holds the record itself: choose another column name")


def _as_vector(value: bytes, name: str, key: str) -> Float32Array:
    array = tensor_from_bytes(value)
    if array.dtype != "float32" or array.ndim != 1:
        raise CodecError(f"column {name!r} of record {key!r} is {array.dtype} with shape {array.shape}: it should be a float32 vector")
    return cast("Float32Array", array)
