"""RegistryService over gRPC: convert, ask the registry, convert back."""

from __future__ import annotations

import grpc

from shoal.codec.services import service_info_from_proto
from shoal.rpc.v1 import registry_pb2, registry_pb2_grpc
from shoal_coordinator.registry import Registry

SERVICE_NAME = "shoal.rpc.v1.RegistryService"


class RegistryServicer(registry_pb2_grpc.RegistryServiceServicer):
    """Serves one registry; errors become statuses in the server's interceptor."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def Register(
        self, request: registry_pb2.RegisterRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> registry_pb2.RegisterResponse:
        """Add or replace a service."""
        lease = self._registry.register(service_info_from_proto(request))
        return registry_pb2.RegisterResponse(
            lease_id=lease.lease_id, lease_s=self._registry.lease_s, required_policy_version=self._registry.required_policy_version
        )

    async def Renew(
        self, request: registry_pb2.RenewRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> registry_pb2.RenewResponse:
        """Extend a lease."""
        self._registry.renew(request.service_id, request.lease_id)
        return registry_pb2.RenewResponse(lease_s=self._registry.lease_s, required_policy_version=self._registry.required_policy_version)

    async def Deregister(
        self, request: registry_pb2.DeregisterRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> registry_pb2.DeregisterResponse:
        """Remove a service that ends in order."""
        self._registry.deregister(request.service_id, request.lease_id)
        return registry_pb2.DeregisterResponse()
