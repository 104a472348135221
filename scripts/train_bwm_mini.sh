#!/usr/bin/env bash
# Makes weights/bwm-mini from nothing but the repository: data, codec, base, fine-tuning, export.
#
#   scripts/train_bwm_mini.sh            # a few CPU-hours; the same call goes on where it was
#   scripts/train_bwm_mini.sh --plan     # only shows the commands
#   SEED=1 scripts/train_bwm_mini.sh     # another seed of the fine-tuning
#
# Every command is one of the README's, resumes by itself and refuses a directory that holds something else. The policy
# and the reward are the shipped ones (their cards say how they were made). Ctrl-C ends the servers too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=1
worldserve=.venv/bin/worldserve
seed=${SEED:-0}
reward=127.0.0.1:${REWARD_PORT:-50163} simulator=127.0.0.1:${SIMULATOR_PORT:-50161} world_model=127.0.0.1:${WORLD_MODEL_PORT:-50162}
plan=false
[[ ${1:-} == --plan ]] && plan=true
[[ $# -gt 0 && $plan == false ]] && { echo "train_bwm_mini: expected --plan or nothing; got $*" >&2; exit 2; }

run() {
  echo "+ $*"
  $plan || "$@"
}

servers=()
stop() { for pid in "${servers[@]:-}"; do [[ -n $pid ]] && kill "$pid" 2>/dev/null; done; wait; }
trap stop EXIT
trap 'exit 130' INT TERM

serve() { # ADDRESS COMMAND...: in the background, until it says that it is ready
  local address=$1 log
  log=$(mktemp -t "train_bwm_mini.XXXXXX")
  shift
  echo "+ $worldserve $* --bind $address &"
  $plan && return
  "$worldserve" "$@" --bind "$address" >"$log" 2>&1 &
  servers+=($!)
  until grep -q '"ready"' "$log"; do
    kill -0 "${servers[-1]}" 2>/dev/null || { cat "$log" >&2; exit 1; }
    sleep 1
  done
}

serve "$reward" serve-reward
serve "$simulator" serve-sim --workers 1 --reward "$reward"

# Rollouts of the supervised policy, exploring as PPO does. Sets of one state differ in their seed, so that states have
# both outcomes; validation states choose, and no sealed test state is drawn.
collect() { # NAME EPISODES FIRST_STATE SEED [SETTING...]
  local name=$1 episodes=$2 first=$3 of=$4
  shift 4
  run $worldserve collect --target "$simulator" --policy weights/policy-sft --mode sample --noise-level 0.45 \
    --episodes "$episodes" --first-state "$first" --seed "$of" --out "runs/$name" "$@"
}
run $worldserve demonstrate --episodes 200 --out runs/demos
run $worldserve demonstrate --episodes 700 --noise-scale 1.6 --first-state 200 --seed 1 --out runs/noisy
run $worldserve demonstrate --episodes 421 --noise-scale 1.5 --seed 7 --out runs/noisy15
collect rollouts 400 600 0
collect rollouts-0 224 0 1 --noise-level 0.5
collect rollouts-300 224 300 1 --noise-level 0.5
collect policy-b0 512 0 21
collect policy-b1 512 512 22
collect policy-b2 1024 0 23
collect policy-b3 1024 0 24
collect reward-held-out 300 0 0 --initial-states initial_states/validation

# The codec sees everything; the base draws the expert's successes alone.
mixed=(runs/rollouts runs/rollouts-0 runs/rollouts-300 runs/policy-b0 runs/policy-b1 runs/policy-b2 runs/noisy15)
run $worldserve finetune-wm --stage codec --data "${mixed[@]:0:5}" runs/demos runs/noisy runs/noisy15 \
  --codec.moving-emphasis 8 --codec.max-episodes 900 --codec.steps 2000 --out runs/wm/codec
run $worldserve finetune-wm --data runs/demos runs/noisy15 --codec-of runs/wm/codec --latents runs/wm/latents \
  --transformer.failure-fraction 0 --transformer.model.pose-map-channels 8 --transformer.model.draft-width 384 \
  --transformer.steps 1600 --transformer.batch-size 8 --transformer.pure-noise-fraction 0.7 --out runs/wm/base

# Pairs: recorded successes of training states, and the smallest change of a few that makes the simulator fail. They come
# from the simulator; the shipped model only says which successes it draws.
serve "$world_model" serve-wm --weights weights/bwm-mini --reward "$reward"
run $worldserve fidelity runs/policy-b1 --successes 240 --failures 40 --target "$world_model" --reward "$reward" \
  --videos 0 --out runs/fidelity/train-pairs
run $worldserve forks runs/policy-b1 --fidelity runs/fidelity/train-pairs --split train --skip-floor --pairs 160 \
  --record runs/pairs --target "$world_model" --reference "$simulator" --out runs/forks/train-pairs

# Failures repair it: 0.45 of the windows, in every directory. The gate watches recall on validation states.
run $worldserve finetune-wm --stage transformer --start runs/wm/base/model --latents runs/wm/latents \
  --data "${mixed[@]}" runs/pairs runs/policy-b3 --transformer.data-weights 12 7 7 18 18 30 10 14 30 \
  --transformer.failure-fraction 0.45 --transformer.steps 1500 --transformer.batch-size 8 \
  --transformer.draft-batch-size 24 --transformer.learning-rate 0.0015 --transformer.pure-noise-fraction 0.7 \
  --gate.reward "$reward" --gate.data runs/reward-held-out --gate.every 500 --gate.episodes 160 --gate.recall 0.9 \
  --seed "$seed" --out "runs/wm/mixed-$seed"
run .venv/bin/python -m services.wm_server.export --run "runs/wm/mixed-$seed" --out "runs/wm/exported-$seed"
