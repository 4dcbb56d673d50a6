#!/bin/sh
# Inside an image build: install the project with an extra into /opt/shoal, from the wheelhouse if it holds wheels.
#   container_install.sh EXTRA      (run in the folder with pyproject.toml)
set -eu
extra=$1
wheelhouse=deploy/wheelhouse
overrides=""
torch=""
case "$extra" in *cpu*|*trainer*) overrides="--override deploy/overrides-cpu.txt"; torch="--torch-backend cpu" ;; esac
if ls "$wheelhouse"/*.whl >/dev/null 2>&1; then
  source="--no-index --find-links $wheelhouse"
  torch=""
else
  source=""
fi
# Debian's pip refuses to touch the system without the flag; other pips of this age know it too.
python3 -m pip install --quiet --no-cache-dir --break-system-packages $source uv
python3 -m uv venv --quiet --python "$(command -v python3)" /opt/shoal
python3 -m uv pip install --quiet --no-cache --python /opt/shoal/bin/python $source $torch $overrides ".[$extra]"
