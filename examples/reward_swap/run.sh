#!/usr/bin/env bash
# Trains on a reward that can be gamed, and replaces it while the training runs: examples/reward_swap/run.sh [FOLDER]
#
# 1. a training starts with the reward `longer`;   2. the service of `sum` is started beside it, checked, warmed up and shadowed;
# 3. it is activated, the old route is drained and retired, and the policy recovers. Nothing else is restarted.
# BAD_STEPS, STEPS, PORT: steps before the swap, steps in all, port of the REST API.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=$PWD/examples/reward_swap
folder=${1:-runs/reward-swap}
bad_steps=${BAD_STEPS:-25} steps=${STEPS:-200} port=${PORT:-8099}
PATH=$PWD/.venv/bin:$PATH
api=http://127.0.0.1:$port
training='' service=''
# Whatever ends this script ends what it has started.
trap 'for pid in $service $training; do kill "$pid" 2>/dev/null || true; done; wait' EXIT
mkdir -p "$folder"

say() { printf '\n$ %s\n' "$*"; "$@" --address "$api"; }
step() { curl -fsS "$api/v1/status" 2>/dev/null | python -c 'import json, sys; print(json.load(sys.stdin)["step"])' 2>/dev/null || echo 0; }
until_step() { while [ "$(step)" -lt "$1" ]; do kill -0 "$training" || exit 1; sleep 0.5; done; }

shoal demo --steps "$steps" --runs "$folder" --reward longer \
  --set "reward.modules=[$here/longer_reward.py]" --set "reward.weights={longer: 1.0}" \
  --set algorithm.kl_coef=0.006 --set evaluation.every=10 --set "coordinator.rest_port=$port" >"$folder/training.log" 2>&1 &
training=$!
until_step 3

shoal reward serve --module "$here/sum_reward.py" --run "$api" --service-id sum-0 >"$folder/sum.log" 2>&1 &
service=$!
say shoal reward add sum --label "the right sum" --why "length can be gamed" --wait
say shoal reward shadow 2 --share 0.5 --why "compare before the swap"
until_step "$bad_steps"
say shoal reward compare 2 --worst 2 --plot "$folder/compare.png"
say shoal reward activate 2 --why "it is being gamed"
until_step $((bad_steps + 5))
say shoal reward retire 1 --why "gamed"
say shoal reward list
say shoal reward log
wait "$training"
training=''
tail -n 7 "$folder/training.log"
