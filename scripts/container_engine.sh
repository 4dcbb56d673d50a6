#!/usr/bin/env bash
# A private container engine for the compose test, where none runs: scripts/container_engine.sh DIR
#
# Debian and root only. Installs docker.io and mmdebstrap, starts dockerd with all its state below DIR, fetches the compose plugin of
# the next Debian release without touching the system's sources, and imports a base image (Python 3.11, pip, libnuma, redis-server).
# Prints `export` lines for the caller. Exit code 3: no engine can run here, the last line says why.
# Stop it with: kill "$(cat DIR/pid)".
set -euo pipefail
log() { echo "container engine: $*" >&2; }
give_up() { log "$*"; exit 3; }

[ "$(id -u)" = 0 ] || give_up "needs root"
command -v apt-get >/dev/null || give_up "needs Debian's apt-get"
dir=$(mkdir -p "$1" && cd "$1" && pwd)
if ! command -v dockerd >/dev/null || ! command -v mmdebstrap >/dev/null; then
  log "installing docker.io, mmdebstrap, iptables"
  apt-get update -qq >&2 || give_up "cannot read the package lists"
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends docker.io mmdebstrap iptables >&2 \
    || give_up "cannot install docker.io, mmdebstrap and iptables"
fi

export DOCKER_HOST=unix://$dir/d.sock DOCKER_CONFIG=$dir/config
if ! docker info >/dev/null 2>&1; then
  log "starting dockerd"
  nohup dockerd --data-root "$dir/root" --exec-root "$dir/exec" -H "$DOCKER_HOST" --pidfile "$dir/pid" >"$dir/dockerd.log" 2>&1 &
  for _ in $(seq 120); do docker info >/dev/null 2>&1 && break; sleep 0.5; done
  docker info >/dev/null 2>&1 || { tail -n 3 "$dir/dockerd.log" >&2; give_up "dockerd did not start; see $dir/dockerd.log"; }
fi

plugins=$DOCKER_CONFIG/cli-plugins
if [ ! -x "$plugins/docker-compose" ]; then
  log "fetching the compose plugin"
  apt=$dir/apt
  mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/unpacked" "$plugins"
  cp /var/lib/dpkg/status "$apt/status"
  mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/*.sources /etc/apt/sources.list.d/*.list 2>/dev/null \
    | sed -n 's/^URIs: *\([^ ]*\).*/\1/p; s/^deb \(\[[^]]*\] \)\?\([^ ]*\).*/\2/p' | sed -n 1p || true)
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" >"$apt/sources.list"
  options=(-o "Dir::Etc::SourceList=$apt/sources.list" -o Dir::Etc::SourceParts=/dev/null -o "Dir::State::Lists=$apt/lists"
    -o "Dir::State::Status=$apt/status" -o "Dir::Cache=$apt/cache" -o APT::Get::List-Cleanup=0)
  apt-get "${options[@]}" update -qq >&2 || give_up "cannot read the package lists of the release with the compose plugin"
  (cd "$apt/unpacked" && apt-get "${options[@]}" download -qq docker-compose docker-buildx >&2) || give_up "cannot download the compose plugin"
  (cd "$apt/unpacked" && for deb in *.deb; do dpkg-deb -x "$deb" .; done)
  cp "$apt"/unpacked/usr/libexec/docker/cli-plugins/* "$plugins/"
fi

packages=python3-minimal,python3-pip,python3-venv,ca-certificates,libnuma1,redis-server,redis-tools
base=shoal-base:$(printf %s "$packages" | sha256sum | cut -c1-12)
if ! docker image inspect "$base" >/dev/null 2>&1; then
  log "making the base image"
  mmdebstrap --quiet --variant=minbase --include="$packages" bookworm "$dir/base.tar" >&2 || give_up "cannot make a base image"
  docker import "$dir/base.tar" "$base" >/dev/null
  rm -f "$dir/base.tar"
fi
echo "export DOCKER_HOST=$DOCKER_HOST DOCKER_CONFIG=$DOCKER_CONFIG BASE_IMAGE=$base REDIS_IMAGE=$base"
