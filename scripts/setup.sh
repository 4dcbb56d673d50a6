#!/usr/bin/env bash
# Create or refresh the virtual environment: scripts/setup.sh [VENV]   (default .venv)
#
# A second run with nothing changed does nothing. The environment is rebuilt in place when
# pyproject.toml, this script or the kind of accelerator changes.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
python=${PYTHON:-python3.11}
stamp_file="$venv/.shoal-setup"

accelerator=cpu
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then accelerator=cuda; fi
stamp=$( { cat pyproject.toml scripts/setup.sh deploy/overrides-cpu.txt; echo "$accelerator"; pwd; } | sha256sum | cut -d' ' -f1)
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp_file" 2>/dev/null || true)" = "$stamp" ]; then
  echo "setup: $venv is up to date ($accelerator), nothing to do"
  exit 0
fi

command -v "$python" >/dev/null 2>&1 || { echo "setup: $python not found; install Python 3.11 or set PYTHON=/path/to/python3.11" >&2; exit 1; }
echo "setup: building $venv for $accelerator"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "uv>=0.9"

# uv does not read pip's find-links, from the environment or from pip.conf.
find_links=${PIP_FIND_LINKS:-$("$venv/bin/python" -m pip config get global.find-links 2>/dev/null || true)}
torch_source=()
overrides=()
if [ "$accelerator" = cpu ]; then
  # The CPU wheels of three of these break `import transformers` beside torch's CPU build; triton has no use there.
  overrides=(--override deploy/overrides-cpu.txt)
  extras=all-cpu,dev
  if [ -n "$find_links" ] && ls ${find_links}/torch-*cpu*.whl >/dev/null 2>&1; then
    export UV_FIND_LINKS=${find_links// /,}
  else
    torch_source=(--torch-backend cpu)
  fi
else
  extras=all,dev
  if [ -n "$find_links" ]; then export UV_FIND_LINKS=${find_links// /,}; fi
fi
VIRTUAL_ENV="$venv" "$venv/bin/uv" pip install --quiet --compile-bytecode --python "$venv/bin/python" "${torch_source[@]}" \
  "${overrides[@]}" --editable ".[$extras]"

# vLLM's CPU build loads libnuma from the system and fails with an unrelated message without it.
if [ "$accelerator" = cpu ] && ! "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "setup: installing libnuma1 (apt)"
    { apt-get install -y -qq libnuma1 || { apt-get update -qq && apt-get install -y -qq libnuma1; }; } >/dev/null 2>&1 || true
  fi
  "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null \
    || { echo "setup: libnuma.so.1 is missing, vLLM needs it: install it with the system's packages (Debian: apt-get install libnuma1)" >&2; exit 1; }
fi
echo "$stamp" >"$stamp_file"
echo "setup: $venv is ready"
