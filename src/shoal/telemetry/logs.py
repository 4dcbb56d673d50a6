"""Structured events over the standard library's logging: an event name plus fields, as JSON or as one plain line.

Prompts, responses and token ids never reach a log: fields with such names are withheld, arrays are shown by shape.

    log = get_logger(__name__)
    log.info("push_committed", push_id=push_id, pause_ms=3.2)
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import sys
import traceback
from types import TracebackType
from typing import IO, Protocol, TypeAlias, runtime_checkable

from shoal.config.models import TelemetrySection

WITHHELD_FIELDS = frozenset(
    {"prompt", "prompts", "prompt_ids", "response", "responses", "response_ids", "text", "tokens", "token_ids", "messages"}
    | {"row", "row_json", "password", "token", "secret", "api_key", "authorization"}
)
MAX_FIELD_CHARS = 2000
_FIELDS_ATTRIBUTE = "shoal_fields"
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


@runtime_checkable
class _Array(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> object: ...


class EventLogger:
    """Writes events with fields; a thin face on one `logging.Logger`."""

    __slots__ = ("_fields", "_logger")

    def __init__(self, logger: logging.Logger, fields: dict[str, object] | None = None) -> None:
        self._logger = logger
        self._fields = {} if fields is None else fields

    def bind(self, **fields: object) -> EventLogger:
        """Return a logger that adds these fields to each of its events."""
        return EventLogger(self._logger, {**self._fields, **fields})

    def debug(self, event: str, /, **fields: object) -> None:
        """Write an event for developers."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: object) -> None:
        """Write an event of normal operation."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: object) -> None:
        """Write an event that an operator may want to see."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: object) -> None:
        """Write a failure."""
        self._write(logging.ERROR, event, fields)

    def exception(self, event: str, /, **fields: object) -> None:
        """Write a failure with the traceback of the exception being handled."""
        self._write(logging.ERROR, event, fields, exc_info=True)

    def _write(self, level: int, event: str, fields: dict[str, object], exc_info: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            merged = {**self._fields, **fields}
            self._logger.log(level, "%s", event, exc_info=exc_info, extra={_FIELDS_ATTRIBUTE: merged}, stacklevel=3)


def get_logger(name: str) -> EventLogger:
    """Return the event logger of a module; pass `__name__`. All of them live below the standard logger `shoal`."""
    full = name if name == "shoal" or name.startswith("shoal.") else "shoal." + name.removeprefix("shoal_")
    return EventLogger(logging.getLogger(full))


def setup_logging(service: str, telemetry: TelemetrySection, *, run_id: str = "", stream: IO[str] | None = None) -> None:
    """Send every log line of this process to one stream; a second call replaces the first.

    Args:
        service: Value of the field `service`, for example "rollout-0".
        telemetry: Level and format. Other libraries' loggers are held at WARNING or above.
        run_id: Value of the field `run`; left out when empty.
        stream: Where lines go; None is standard error.
    """
    base: dict[str, object] = {"service": service}
    if run_id:
        base["run"] = run_id
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(_JsonFormatter(base) if telemetry.log_format == "json" else _TextFormatter(base))
    level = _LEVELS[telemetry.log_level]
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))
    logging.getLogger("shoal").setLevel(level)


class _JsonFormatter(logging.Formatter):
    def __init__(self, base: dict[str, object]) -> None:
        super().__init__()
        self._base = base

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {"time": _timestamp(record), "level": record.levelname.lower(), **self._base}
        line["logger"] = record.name
        line["event"] = record.getMessage()
        for key, value in _fields_of(record).items():
            line[key if key not in line else f"{key}_"] = value
        if record.exc_info:
            line["exception"] = _exception_text(record.exc_info)
        return json.dumps(line, ensure_ascii=False, allow_nan=False)


class _TextFormatter(logging.Formatter):
    def __init__(self, base: dict[str, object]) -> None:
        super().__init__()
        self._prefix = " ".join(f"{value}" for value in base.values())

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {key}={json.dumps(value, ensure_ascii=False)}" for key, value in _fields_of(record).items())
        line = f"{_timestamp(record)} {record.levelname:<7} {self._prefix} {record.name}: {record.getMessage()}{fields}"
        return line if not record.exc_info else f"{line}\n{_exception_text(record.exc_info)}"


def _timestamp(record: logging.LogRecord) -> str:
    return datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")


def _exception_text(exc_info: _ExcInfo) -> str:
    return "".join(traceback.format_exception(*exc_info)).rstrip()


def _fields_of(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = getattr(record, _FIELDS_ATTRIBUTE, {})
    return {key: "[withheld]" if key.lower() in WITHHELD_FIELDS else _plain(value) for key, value in fields.items()}


def _plain(value: object, depth: int = 0) -> object:
    """Turn a field's value into something JSON can carry, bounded in size and without array contents."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        # NaN and infinities are not JSON.
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if isinstance(value, _Array):
        return f"<array {value.dtype} {tuple(value.shape)}>"
    if isinstance(value, dict) and depth < 3:
        return {str(key): "[withheld]" if str(key).lower() in WITHHELD_FIELDS else _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset) and depth < 3:
        return [_plain(item, depth + 1) for item in list(value)[:100]]
    text = str(value)
    return text if len(text) <= MAX_FIELD_CHARS else f"{text[:MAX_FIELD_CHARS]}… ({len(text)} characters)"
