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
# Needed by redis on Python before 3.11.3, and by the image build.
printf '%s\n' async-timeout uv >>"$pins"
download() { "$venv/bin/python" -m pip download --quiet --disable-pip-version-check --prefer-binary --dest "$out" "$@"; }
download --no-deps --requirement "$pins"
download "hatchling>=1.27" # with what it needs
echo "wheelhouse: $(ls "$out"/*.whl | wc -l) wheels, $(du -sh "$out" | cut -f1)"
