#!/usr/bin/env bash
# Generate the committed gRPC stubs from protos/: scripts/gen_protos.sh [OUT]   (default src)
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-src}
bin=$(pwd)/${VENV:-.venv}/bin
PATH="$bin:$PATH" "$bin/python" -m grpc_tools.protoc -I protos --python_out="$out" --grpc_python_out="$out" \
  --mypy_out="$out" --mypy_grpc_out="$out" protos/shoal/rpc/v1/*.proto
