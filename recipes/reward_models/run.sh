#!/usr/bin/env bash
# Trains and judges a process reward model (PRM800K, ProcessBench) and two outcome reward models (generated
# preferences, hh-rlhf by 5-fold cross-validation).
#   run.sh MODEL DATA OUT [PART …]     parts: prm, generated, hh; all if none is named
# DATA holds prm800k_phase1, processbench and hh_rlhf. The environment may say
#   SIZE   gpu, or cpu: 640 rated steps, short rows and 100 solutions for the process reward model; MODEL is stories260k
# Started again with the same OUT, it does not repeat training that has finished.
set -euo pipefail
MODEL=${1:?model folder} DATA=${2:?data folder} OUT=${3:?folder to write to}
shift 3
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python3} SIZE=${SIZE:-gpu}
PARTS=${*:-prm generated hh}
mkdir -p "$OUT"
PRM=(data.train_batch_size=128 data.max_token_len_per_gpu=32768 head_stage.lr=1e-3
    head_stage.total_training_steps=100 optim.lr=5e-5 optim.lr_scheduler_type=cosine
    optim.lr_warmup_steps_ratio=0.05 trainer.total_epochs=1)
RM=(data.train_batch_size=32 data.max_token_len_per_gpu=32768 optim.lr=2e-5
    optim.lr_scheduler_type=cosine trainer.total_epochs=2)
GENERATED=("${RM[@]}" data.train_batch_size=64)
JUDGE=(data.max_length=8192 data.max_token_len_per_gpu=65536)
BENCH=(gsm8k.jsonl math.jsonl.gz olympiadbench.jsonl.gz omnimath.jsonl.gz)
COMMON=(trainer.logger='[jsonl]' model.path="$MODEL")
if [ "$SIZE" = cpu ]; then
    # stories260k has no chat template and no one-token line break
    RAW=(data.prompt_format=raw data.step_separator=\</s\>)
    PRM+=("${RAW[@]}" data.train_max_samples=640 data.val_max_samples=100 data.max_length=384
        data.train_batch_size=32 data.max_token_len_per_gpu=8192 head_stage.total_training_steps=5 optim.lr=1e-3)
    JUDGE=("${RAW[@]}" data.val_max_samples=100 data.max_length=16384 data.max_token_len_per_gpu=16384)
    BENCH=(gsm8k.jsonl)
    RM+=(data.prompt_format=raw data.max_length=512 optim.lr=1e-3 trainer.total_epochs=1)
    GENERATED+=(data.prompt_format=raw optim.lr=1e-2)
fi

prm() {
    "$PYTHON" -m hone.trainer.main_prm "${PRM[@]}" "${COMMON[@]}" trainer.default_local_dir="$OUT/prm" \
        data.train_files="$DATA/prm800k_phase1/train.jsonl.gz" data.val_files="$DATA/prm800k_phase1/test.jsonl.gz"
    local bench=() file
    for file in "${BENCH[@]}"; do bench+=(--processbench "$DATA/processbench/$file"); done
    "$PYTHON" -m hone.trainer.main_eval_prm "${bench[@]}" --baseline "$MODEL" --out "$OUT/prm.json" \
        "${JUDGE[@]}" model.path="$OUT/prm" data.val_files="$DATA/prm800k_phase1/test.jsonl.gz"
}

generated() {
    "$PYTHON" "$HERE/prepare.py" "$OUT/generated"
    local files=(data.train_files="$OUT/generated/train.jsonl" data.val_files="$OUT/generated/test.jsonl")
    "$PYTHON" -m hone.trainer.main_rm "${GENERATED[@]}" "${COMMON[@]}" "${files[@]}" \
        trainer.default_local_dir="$OUT/rm_generated"
    "$PYTHON" -m hone.trainer.main_eval_rm --baseline "$MODEL" --out "$OUT/rm_generated.json" \
        "${GENERATED[@]}" "${files[1]}" model.path="$OUT/rm_generated"
}

hh() {
    "$PYTHON" -m hone.trainer.main_eval_rm --folds 5 --baseline "$MODEL" --out "$OUT/rm_hh.json" \
        "${RM[@]}" "${COMMON[@]}" data.train_files="$DATA/hh_rlhf/harmless_base_test.jsonl.gz" \
        data.on_bad_row=skip data.drop_duplicates=true checkpoint.save_contents='[model]' \
        trainer.default_local_dir="$OUT/rm_hh"
}

for part in $PARTS; do "$part"; done
