#!/usr/bin/env bash
# GSM8K with SmolLM2-135M: SFT on the train split, then GRPO, PPO and GRPO with a calculator; all 1,319 test problems.
#   run.sh MODEL DATA OUT [key=value overrides of the RL runs]
# MODEL is the folder of `hone model get smollm2-135m MODEL`, DATA that of prepare.py. The environment may say
#   SEED       1                      RUNS   "grpo ppo tools": the RL runs, all at once on the one device
#   SFT_ARGS   overrides of both SFT runs
# Started again with the same OUT, it does not repeat what has finished.
set -euo pipefail
MODEL=${1:?model folder} DATA=${2:?data folder} OUT=${3:?folder to write to}
shift 3
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python3} SEED=${SEED:-1} RUNS=${RUNS:-grpo ppo tools}
mkdir -p "$OUT"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

sft() { # name of the data file, folder
    # shellcheck disable=SC2086
    "$PYTHON" -m hone.trainer.main_sft --config-path "$HERE" --config-name sft \
        model.path="$MODEL" data.train_files="$DATA/$1.parquet" trainer.seed="$SEED" \
        trainer.default_local_dir="$OUT/$1" ${SFT_ARGS:-} >"$OUT/$1.log" 2>&1
}

rl() { # configuration, model, suffix of the data files, folder, overrides…
    local config=$1 model=$2 suffix=$3 name=$4
    shift 4
    "$PYTHON" -m hone.trainer.main_ppo --config-path "$HERE" --config-name "$config" \
        actor_rollout_ref.model.path="$model" \
        data.train_files="$DATA/train$suffix.parquet" data.val_files="$DATA/test$suffix.parquet" \
        trainer.seed="$SEED" trainer.default_local_dir="$OUT/$name" "$@" >"$OUT/$name.log" 2>&1
}

jobs=() # `jobs -p` does not list a job that has ended
background() {
    "$@" &
    jobs+=($!)
}

together() { # wait for all background jobs; the first failure ends the script
    local failed=0 job
    for job in "${jobs[@]}"; do wait "$job" || failed=1; done
    jobs=()
    [ $failed = 0 ] || { tail -n 5 "$OUT"/*.log; exit 1; }
}

background sft sft
background sft sft_tools
background rl grpo "$MODEL" "" untrained trainer.val_only=true
TOOLS=(actor_rollout_ref.rollout.multi_turn.tool_config_path="$HERE/calculator.yaml")
background rl tools "$MODEL" _tools untrained_tools trainer.val_only=true "${TOOLS[@]}"
together
for run in $RUNS; do
    if [ "$run" = tools ]; then
        background rl tools "$OUT/sft_tools" _tools "tools-$SEED" "${TOOLS[@]}" "$@"
    else
        background rl "$run" "$OUT/sft" "" "$run-$SEED" "$@"
    fi
done
together
"$PYTHON" "$HERE/results.py" "$OUT" "$OUT/results.json"
