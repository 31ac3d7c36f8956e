#!/usr/bin/env bash
# Trains a policy on generated preferences, whose truth is known.   run.sh MODEL OUT [key=value …]
# The environment may say SIZE: gpu, or cpu (MODEL is a tiny one without a chat template, such as stories260k)
set -euo pipefail
MODEL=${1:?model folder} OUT=${2:?folder to write to}
shift 2
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python3} SIZE=${SIZE:-gpu}
SETTINGS=()
if [ "$SIZE" = cpu ]; then
    SETTINGS=(data.prompt_format=raw data.train_max_samples=2048 data.val_max_samples=200 optim.lr=1e-3)
fi
mkdir -p "$OUT"
"$PYTHON" "$HERE/../reward_models/prepare.py" "$OUT/data"
"$PYTHON" -m hone.trainer.main_dpo --config-path "$HERE" --config-name dpo model.path="$MODEL" \
    data.train_files="$OUT/data/train.jsonl" data.val_files="$OUT/data/test.jsonl" \
    trainer.default_local_dir="$OUT/run" "${SETTINGS[@]}" "$@"
