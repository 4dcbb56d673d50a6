#!/usr/bin/env bash
# Fill deploy/wheelhouse with every wheel that the images need, so that they build without a network:
#   scripts/wheelhouse.sh      (after scripts/setup.sh on a machine without a GPU; the versions are those of the virtual environment)
# A second run with nothing changed does nothing.
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
stamp=$( { cat "$pins" scripts/wheelhouse.sh; } | sha256sum | cut -d' ' -f1)
if [ "$(cat "$out/.stamp" 2>/dev/null || true)" = "$stamp" ]; then
  echo "wheelhouse: $out is up to date, nothing to do"
  exit 0
fi
# Other versions of before must not win.
rm -f "$out"/.stamp "$out"/*.whl "$out"/*.tar.gz
# Those that are published as source only are built here (gcc): the images have no compiler.
wheels() { "$venv/bin/python" -m pip wheel --quiet --disable-pip-version-check --prefer-binary --wheel-dir "$out" "$@"; }
wheels --no-deps --requirement "$pins"
wheels "hatchling>=1.27" # with what it needs
echo "$stamp" >"$out/.stamp"
echo "wheelhouse: $(ls "$out"/*.whl | wc -l) wheels, $(du -sh "$out" | cut -f1)"
