#!/usr/bin/env bash
# Static checks: formatting, lint, types, import rules, proto lint, committed stubs equal to generated ones.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(pwd)/${VENV:-.venv}/bin

step() { echo "check: $*"; }

step "ruff"
"$bin/ruff" check .
"$bin/ruff" format --check --quiet .
step "mypy --strict"
"$bin/mypy"
step "import rules"
"$bin/lint-imports"
step "buf lint"
(cd protos && "$bin/buf" lint)
step "committed stubs"
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
VENV=${VENV:-.venv} scripts/gen_protos.sh "$fresh" >/dev/null 2>&1
diff -ru --exclude=__init__.py --exclude=__pycache__ src/shoal/rpc/v1 "$fresh/shoal/rpc/v1" \
  || { echo "check: stubs differ from protos; run 'make protos' and commit" >&2; exit 1; }
echo "check: all passed"
