#!/usr/bin/env bash
# GSM8K over several turns: the model may check an answer with a tool before it gives it. Metrics go to MLflow too.
#   python examples/data_preprocess/gsm8k_multiturn_w_tool.py --local_dir ~/data/gsm8k_tool
#   bash examples/sglang_multiturn/run_qwen2.5-3b_gsm8k_tool_agent_mlflow.sh
# DATA and MODEL name other files; every further word is an override of a key. Any engine serves the turns.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
data=${DATA:-$HOME/data/gsm8k_tool}
model=${MODEL:-Qwen/Qwen2.5-3B-Instruct}

python3 -m hone.trainer.main_ppo \
    --config-path="$here/config" \
    --config-name=gsm8k_multiturn_grpo \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    actor_rollout_ref.model.path="$model" \
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$here/config/tool_config/gsm8k_tool_config.yaml" \
    trainer.logger='["console","mlflow"]' \
    trainer.project_name=gsm8k-tool-agent \
    trainer.experiment_name=qwen2.5-3b-tool-agent \
    "$@"
