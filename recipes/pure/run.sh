#!/usr/bin/env bash
# PURE on arithmetic chains: SFT, a process reward model trained on labelled samples, then the RL cells.
#   run.sh OUT             the GPU size: all cells of SEEDS
#   run.sh --small OUT     some cells at a CPU size: minutes on two cores
# Further key=value overrides go to every RL run. The environment may say
#   SEEDS   "1"            CELLS   names of cells (cells.py lists them), and JOBS (3) processes that share them
#   WORLD, LABEL, SFT, PRM arguments of world.py and overrides of the two trainings; SAMPLES of how many prompts
# Started again with the same OUT, it does not make again what is finished.
set -euo pipefail
# shellcheck disable=SC2086
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python3} SEEDS=${SEEDS:-1} JOBS=${JOBS:-3}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
small=() sft=() prm=() rl=() samples=6000
# The first runs also compile kernels, so those with short responses come first.
all="vr strict-prm strict-prmvr soft-prmvr soft-prm soft-oracle soft-noisy gamma-noisy prime"
all+=" gamma-oracle gamma-prmvr gamma-prm"
if [ "${1:?OUT, or --small OUT}" = --small ]; then
    shift
    JOBS=1 all="vr soft-prm gamma-prm" samples=600
    small=(--hidden 96 --layers 2 --train 4000 --test 64 --demonstrations 8000)
    sft=(data.train_batch_size=48 optim.lr=3e-3 trainer.total_training_steps=2400)
    prm=(data.train_batch_size=32 optim.lr=2e-3 trainer.total_training_steps=400 head_stage.total_training_steps=20)
    rl=(data.train_batch_size=16 actor_rollout_ref.actor.ppo_mini_batch_size=16 trainer.total_training_steps=40
        actor_rollout_ref.actor.optim.lr=3e-4 data.max_response_length=96)
fi
OUT=$1 CELLS=${CELLS:-$all}
shift
mkdir -p "$OUT/logs"
started=$SECONDS
log() { echo "$1 at $((SECONDS - started)) s" >&2; }

if [ ! -f "$OUT/prm.json" ]; then # the world, the policy and the process reward model of all cells and seeds
    [ -d "$OUT/world/base" ] || "$PYTHON" "$HERE/world.py" "$OUT/world" "${small[@]}" ${WORLD:-}
    "$PYTHON" -m hone.trainer.main_sft --config-path "$HERE" --config-name sft model.path="$OUT/world/base" \
        data.train_files="$OUT/world/sft.jsonl" trainer.default_local_dir="$OUT/sft" "${sft[@]}" ${SFT:-} \
        >"$OUT/logs/sft.log" 2>&1
    log "SFT"
    "$PYTHON" -m hone.trainer.main_generation model.path="$OUT/sft" data.path="$OUT/world/train.jsonl" \
        data.prompt_format=raw data.output_path="$OUT/samples.parquet" data.n_samples=4 data.batch_size=512 \
        data.max_samples="${SAMPLES:-$samples}" rollout.temperature=1.0 rollout.top_p=1.0 rollout.top_k=-1 \
        rollout.response_length=128 >"$OUT/logs/samples.log" 2>&1
    "$PYTHON" "$HERE/world.py" --label "$OUT/samples.parquet" "$OUT/steps" ${LABEL:-}
    log "samples"
    "$PYTHON" -m hone.trainer.main_prm --config-path "$HERE" --config-name prm model.path="$OUT/sft" \
        data.train_files="$OUT/steps/train.jsonl" trainer.default_local_dir="$OUT/prm" "${prm[@]}" ${PRM:-} \
        >"$OUT/logs/prm.log" 2>&1
    "$PYTHON" -m hone.trainer.main_eval_prm --config-path "$HERE" --config-name prm model.path="$OUT/prm" \
        data.val_files="$OUT/steps/test.jsonl" --out "$OUT/prm.json"
    log "process reward model"
fi

names=() jobs=() failed=0
for seed in $SEEDS; do for cell in $CELLS; do
    names+=("$cell-$seed")
done; done
for ((j = 0; j < JOBS; j++)); do
    mine=()
    for ((i = j; i < ${#names[@]}; i += JOBS)); do mine+=("${names[i]}"); done
    [ ${#mine[@]} = 0 ] && continue
    "$PYTHON" "$HERE/cells.py" run "$OUT" "${mine[@]}" "${rl[@]}" "$@" >"$OUT/logs/cells-$j.log" 2>&1 &
    jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job" || failed=1; done
log "cells"
"$PYTHON" "$HERE/cells.py" collect "$OUT/curves" "$OUT"
exit "$failed"
