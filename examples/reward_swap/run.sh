#!/usr/bin/env bash
# Trains on a reward that can be gamed, and replaces it while the training runs: examples/reward_swap/run.sh [RUNS_FOLDER]
#
# 1. a training starts with the reward `longer`;   2. the service of `sum` is started beside it, checked, warmed up and shadowed;
# 3. it is activated, the old route drains and is retired, and the policy recovers. Nothing else is restarted.
set -euo pipefail
cd "$(dirname "$0")/../.."
runs=${1:-runs}
here=$PWD/examples/reward_swap
bad_steps=${BAD_STEPS:-30} steps=${STEPS:-150} port=${PORT:-8099}
PATH=$PWD/.venv/bin:$PATH
api=http://127.0.0.1:$port
training='' service=''
# Whatever ends this script ends what it has started.
trap 'for pid in $service $training; do kill "$pid" 2>/dev/null || true; done; wait' EXIT

say() { printf '\n$ %s\n' "$*"; "$@"; }
step() { curl -fsS "$api/v1/status" 2>/dev/null | python -c 'import json, sys; print(json.load(sys.stdin)["step"])' 2>/dev/null || echo 0; }
until_step() { while [ "$(step)" -lt "$1" ]; do kill -0 "$training" || exit 1; sleep 0.5; done; }

shoal demo --steps "$steps" --runs "$runs" --reward longer \
  --set "reward.modules=[$here/longer_reward.py]" --set "reward.weights={longer: 1.0}" \
  --set algorithm.kl_coef=0.05 --set evaluation.every=10 --set "coordinator.rest_port=$port" >"$runs.log" 2>&1 &
training=$!
until_step 5

shoal reward serve --module "$here/sum_reward.py" --run "$api" --service-id sum-0 >"$runs-sum.log" 2>&1 &
service=$!
say shoal reward add sum --label "the right sum" --address "$api" --why "longer can be gamed" --wait
say shoal reward shadow 2 --share 0.5 --address "$api" --why "compare before the swap"
until_step "$bad_steps"
say shoal reward compare 2 --address "$api" --plot "$runs-compare.png"
say shoal reward activate 2 --address "$api" --why "it is being gamed"
until_step $((bad_steps + 3))
say shoal reward list --address "$api"
say shoal reward retire 1 --address "$api" --why "gamed"
say shoal reward log --address "$api"
wait "$training"
training=''
tail -n 8 "$runs.log"
