"""The one server interceptor: deadlines, the error catalogue, error ids and metrics.

Every handler is wrapped; a handler raises ShoalErrors and never touches status codes.
"""

from __future__ import annotations

import asyncio
import inspect
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc

from shoal.errors import CapacityError, InternalError, InvalidRequestError, ShoalError
from shoal.rpc.catalogue import error_metadata, to_status
from shoal.rpc.settings import MAX_MESSAGE_BYTES
from shoal.telemetry.logs import get_logger
from shoal.telemetry.metrics import counter, histogram

log = get_logger(__name__)

# Probes of other systems (kubelet, load balancers) watch health without a deadline.
_NO_DEADLINE_PREFIX = "/grpc.health.v1.Health/"

_calls = counter("rpc", "server", "calls", "Calls answered, by method and gRPC status.", ("method", "status"))
_seconds = histogram("rpc", "server_call", "seconds", "Time to answer a call, by method and gRPC status.", ("method", "status"))

# grpcio's handlers and contexts are generic over message types that an interceptor does not know.
_Handler: TypeAlias = Any
_Context: TypeAlias = Any
_Message: TypeAlias = Any


class ServiceInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler that streams in at most one direction."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        """Return the wrapped handler of a call, or None for an unknown method."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        if handler.request_streaming and handler.response_streaming:
            return handler
        codecs = {"request_deserializer": handler.request_deserializer, "response_serializer": handler.response_serializer}
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_wrap_stream(handler.unary_stream, method), **codecs)
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(_wrap_unary(handler.stream_unary, method), **codecs)
        return grpc.unary_unary_rpc_method_handler(_wrap_unary(handler.unary_unary, method), **codecs)


def _wrap_unary(behaviour: Callable[[_Message, _Context], Any], method: str) -> Callable[[_Message, _Context], Awaitable[_Message]]:
    async def call(request: _Message, context: _Context) -> _Message:
        async with _guard(method, context):
            answer = behaviour(request, context)
            if inspect.isawaitable(answer):
                answer = await answer
            _check_size(answer, method)
            return answer

    return call


def _wrap_stream(behaviour: Callable[[_Message, _Context], Any], method: str) -> Callable[[_Message, _Context], AsyncIterator[_Message]]:
    async def call(request: _Message, context: _Context) -> AsyncIterator[_Message]:
        async with _guard(method, context):
            answers = behaviour(request, context)
            if not hasattr(answers, "__aiter__"):
                # A coroutine that answers through context.write.
                await answers
                return
            try:
                async for answer in answers:
                    _check_size(answer, method)
                    yield answer
            finally:
                # Runs the handler's own clean-up now rather than when the generator is collected.
                await answers.aclose()

    return call


@asynccontextmanager
async def _guard(method: str, context: _Context) -> AsyncIterator[None]:
    start_s = time.perf_counter()
    status = grpc.StatusCode.OK
    try:
        _require_deadline(method, context)
        yield
    except ShoalError as error:
        status, text = to_status(error)
        log.debug("call_refused", method=method, status=status.name, error=text)
        await _abort(context, error)
    except grpc.aio.AbortError:
        status = _status_set_by(context)
        raise
    except (asyncio.CancelledError, GeneratorExit):
        status = grpc.StatusCode.CANCELLED
        raise
    except Exception:
        # The edge of a service: a fault becomes INTERNAL with an id that its log explains.
        status = grpc.StatusCode.INTERNAL
        error_id = uuid.uuid4().hex[:12]
        log.exception("call_failed", method=method, error_id=error_id)
        await _abort(context, InternalError(f"internal error {error_id}; the service's log explains it"))
    finally:
        _calls.labels(method, status.name).inc()
        _seconds.labels(method, status.name).observe(time.perf_counter() - start_s)


def _require_deadline(method: str, context: _Context) -> None:
    if context.time_remaining() is None and not method.startswith(_NO_DEADLINE_PREFIX):
        raise InvalidRequestError(f"{method} was called without a deadline; pass a timeout with every call")


def _check_size(answer: _Message, method: str) -> None:
    num_bytes = answer.ByteSize() if hasattr(answer, "ByteSize") else 0
    if num_bytes > MAX_MESSAGE_BYTES:
        raise CapacityError(
            f"the answer of {method} has {num_bytes} bytes, above the limit of {MAX_MESSAGE_BYTES} bytes; ask for less at once"
        )


async def _abort(context: _Context, error: ShoalError) -> None:
    status, text = to_status(error)
    await context.abort(status, text, error_metadata(error))


def _status_set_by(context: _Context) -> grpc.StatusCode:
    code = context.code()
    for status in grpc.StatusCode:
        if code in (status, status.value[0]):
            return status
    return grpc.StatusCode.UNKNOWN
