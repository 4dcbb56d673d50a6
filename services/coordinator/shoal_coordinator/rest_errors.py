"""Every refusal of the REST API in one form: what is wrong, which value, what to do."""

from __future__ import annotations

import reprlib

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ExceptionHandler

from shoal.errors import CapacityError, DeadlineError, InvalidRequestError, NotFoundError, ShoalError, StateError
from shoal_coordinator.rest_models import ErrorDetail, ErrorModel
from shoal_coordinator.rewards.route_record import UnknownRevisionError

_SEE_DOCS = "see /docs for the paths and methods of this API"
_FIXES = {400: "send one JSON object in UTF-8", 413: "send less"}
_SHOWN_CHARS = 300

_short = reprlib.Repr()
# A value is shown to find it again; neither its size nor its depth must be that of the answer.
_short.maxstring = _short.maxother = _short.maxlong = _SHOWN_CHARS


def add_error_handlers(app: FastAPI) -> None:
    """Answer errors of the product, and of whoever asks, in the form of `ErrorModel`."""
    handlers: list[tuple[type[Exception], ExceptionHandler]] = [
        (HTTPException, _on_http),  # type: ignore[list-item]
        (RequestValidationError, _on_validation),  # type: ignore[list-item]
        (StateError, _on_state),  # type: ignore[list-item]
        (NotFoundError, _on_state),  # type: ignore[list-item]
        (UnknownRevisionError, _on_unknown),  # type: ignore[list-item]
        (CapacityError, _on_state),  # type: ignore[list-item]
        (InvalidRequestError, _on_invalid),  # type: ignore[list-item]
        (DeadlineError, _on_late),  # type: ignore[list-item]
    ]
    for kind, handler in handlers:
        app.add_exception_handler(kind, handler)


async def _on_http(request: Request, error: HTTPException) -> JSONResponse:
    fix = _FIXES.get(error.status_code, _SEE_DOCS)
    return _error(error.status_code, str(error.detail), f"{request.method} {request.url.path}", fix)


async def _on_validation(request: Request, error: RequestValidationError) -> JSONResponse:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        place = f"character {first['loc'][-1]} of the body"
        return _error(422, f"the body is not JSON: {first['ctx']['error']}", place, _FIXES[400])
    where = ".".join(str(part)[:_SHOWN_CHARS] for part in first["loc"])
    return _error(422, f"{where}: {first['msg']}", _short.repr(first.get("input")), f"correct {where}; /docs has its range")


async def _on_state(request: Request, error: ShoalError) -> JSONResponse:
    where = "/v1/rewards" if request.url.path.startswith("/v1/rewards") else "/v1/status"
    return _error(409, str(error), request.url.path, f"look at {where} and try again when the state allows it")


async def _on_unknown(request: Request, error: ShoalError) -> JSONResponse:
    return _error(404, str(error), request.url.path, "give the number of a revision that /v1/rewards lists")


async def _on_invalid(request: Request, error: ShoalError) -> JSONResponse:
    return _error(422, str(error), request.url.path, "correct the body; /docs has its fields")


async def _on_late(request: Request, error: DeadlineError) -> JSONResponse:
    return _error(504, str(error), request.url.path, "give a longer timeout_s, or try again when the run is between pushes")


def _error(status: int, what: str, value: str, fix: str) -> JSONResponse:
    body = ErrorModel(error=ErrorDetail(what=what, value=value, fix=fix))
    return JSONResponse(body.model_dump(), status_code=status)
