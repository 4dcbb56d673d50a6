#!/usr/bin/env bash
# Fill deploy/wheelhouse with every wheel that the images need, so that they build without a network:
#   scripts/wheelhouse.sh      (after scripts/setup.sh; the versions are those of the virtual environment)
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
out=deploy/wheelhouse
mkdir -p "$out"
pins=$(mktemp)
trap 'rm -f "$pins"' EXIT
"$venv/bin/uv" pip freeze --python "$venv/bin/python" --exclude-editable >"$pins"
# Needed by the build itself, and by redis on Python before 3.11.3.
printf '%s\n' hatchling editables pathspec pluggy trove-classifiers async-timeout uv >>"$pins"
"$venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --prefer-binary --dest "$out" --requirement "$pins"
echo "wheelhouse: $(ls "$out"/*.whl | wc -l) wheels, $(du -sh "$out" | cut -f1)"
