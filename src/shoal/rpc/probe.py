"""Container health check: python -m shoal.rpc.probe HOST:PORT; exit code 0 only if the service says SERVING."""

from __future__ import annotations

import argparse
import sys

import grpc
from grpc_health.v1 import health_pb2

_TIMEOUT_S = 3.0


def probe(address: str) -> bool:
    """Whether the service at address answers SERVING within 3 s."""
    with grpc.insecure_channel(address) as channel:
        try:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            answer = check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    return 0 if probe(parser.parse_args().address) else 1


if __name__ == "__main__":
    sys.exit(main())
