#!/usr/bin/env bash
# Exact match and searches per question on every set of DATA_DIR/test.parquet, without training.
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/train_grpo.sh" \
    data.train_files="$DATA_DIR/test.parquet" \
    trainer.val_only=true \
    trainer.experiment_name="${EXPERIMENT_NAME:-search-r1-evaluation}" \
    "$@"
