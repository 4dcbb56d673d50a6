"""gRPC: server and channel factories, the error catalogue, retries, health; generated stubs in `v1`."""
