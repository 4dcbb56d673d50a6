#!/usr/bin/env bash
# A private container engine for the compose test, where none runs: scripts/container_engine.sh DIR
#
# Debian and root only. Installs docker.io and mmdebstrap, starts dockerd with all its state below DIR, fetches the compose plugin of
# the next Debian release without touching the system's sources, and imports a base image (Python 3.11, pip, redis-server) as
# shoal-base. Prints `export` lines for the caller. Stop it with: kill "$(cat DIR/pid)".
set -euo pipefail
dir=$(mkdir -p "$1" && cd "$1" && pwd)
log() { echo "container engine: $*" >&2; }

[ "$(id -u)" = 0 ] || { log "needs root"; exit 3; }
command -v apt-get >/dev/null || { log "needs Debian's apt-get"; exit 3; }
if ! command -v dockerd >/dev/null || ! command -v mmdebstrap >/dev/null; then
  log "installing docker.io, mmdebstrap, iptables"
  apt-get update -qq >&2
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends docker.io mmdebstrap iptables >&2
fi

export DOCKER_HOST=unix://$dir/d.sock DOCKER_CONFIG=$dir/config
if ! docker info >/dev/null 2>&1; then
  log "starting dockerd"
  nohup dockerd --data-root "$dir/root" --exec-root "$dir/exec" -H "$DOCKER_HOST" --pidfile "$dir/pid" >"$dir/dockerd.log" 2>&1 &
  for _ in $(seq 120); do docker info >/dev/null 2>&1 && break; sleep 0.5; done
  docker info >/dev/null 2>&1 || { log "dockerd did not start; see $dir/dockerd.log"; tail -n 3 "$dir/dockerd.log" >&2; exit 3; }
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
  apt-get "${options[@]}" update -qq >&2
  (cd "$apt/unpacked" && apt-get "${options[@]}" download -qq docker-compose docker-buildx >&2 && for deb in *.deb; do dpkg-deb -x "$deb" .; done)
  cp "$apt"/unpacked/usr/libexec/docker/cli-plugins/* "$plugins/"
fi

if ! docker image inspect shoal-base >/dev/null 2>&1; then
  log "making the base image"
  mmdebstrap --quiet --variant=minbase --include=python3-minimal,python3-pip,python3-venv,ca-certificates,redis-server,redis-tools \
    bookworm "$dir/base.tar" >&2
  docker import "$dir/base.tar" shoal-base >/dev/null
  rm -f "$dir/base.tar"
fi
echo "export DOCKER_HOST=$DOCKER_HOST DOCKER_CONFIG=$DOCKER_CONFIG BASE_IMAGE=shoal-base REDIS_IMAGE=shoal-base"
