#!/bin/sh
# Inside an image build, in the folder with pyproject.toml: install into /opt/shoal, from the wheelhouse if it holds wheels.
#   container_install.sh dependencies EXTRA...    what the project needs with extras, into a virtual environment
#   container_install.sh project                  the project itself, in a folder of its own: a small layer on top
set -eu
wheelhouse=deploy/wheelhouse
python=/opt/shoal/venv/bin/python
source=""
if ls "$wheelhouse"/*.whl >/dev/null 2>&1; then source="--no-index --find-links $wheelhouse"; fi
install() {
  # The root file system of a container is read-only: what is not compiled here would be compiled again at every start.
  # shellcheck disable=SC2086 # the source is several words
  python3 -m uv pip install --quiet --no-cache --compile-bytecode --python "$python" $source "$@"
}

case "${1:-}" in
  dependencies)
    shift
    extras=$*
    # reasoning-gym needs pycosat, which is published as source only.
    case " $extras " in
      *" reward "*)
        if [ -z "$source" ] && ! command -v gcc >/dev/null; then
          apt-get update -qq
          apt-get install -y -qq --no-install-recommends gcc libc6-dev
        fi
        ;;
    esac
    # Debian's pip refuses to touch the system without the flag; other pips of this age know it too.
    # shellcheck disable=SC2086
    python3 -m pip install --quiet --no-cache-dir --break-system-packages --root-user-action ignore $source uv
    python3 -m uv venv --quiet --python "$(command -v python3)" /opt/shoal/venv
    set -- --requirement pyproject.toml
    for extra in $extras; do set -- "$@" --extra "$extra"; done
    case " $extras " in
      *-cpu\ * | *" reward-model "*)
        set -- "$@" --override deploy/overrides-cpu.txt
        [ -n "$source" ] || set -- "$@" --torch-backend cpu
        ;;
    esac
    install "$@"
    ;;
  project) install --no-deps --target /opt/shoal/project . ;;
  *)
    echo "container_install.sh: what to install? dependencies EXTRA..., or project" >&2
    exit 2
    ;;
esac
