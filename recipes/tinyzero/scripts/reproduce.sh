#!/usr/bin/env bash
# TinyZero from nothing: data, a fresh model, SFT, then PPO and GRPO with several seeds, and their curves.
#   reproduce.sh OUT           14M parameters, numbers up to 99: for one GPU
#   reproduce.sh OUT --small   0.5M parameters, numbers up to 20: for a CPU
# Further key=value overrides go to every RL run. The environment may say
#   SEEDS        "1 2 3" ("1" with --small)     ALGORITHMS   "grpo ppo"
#   TOGETHER     runs at a time on the one device: 6 (1 with --small); they share out the cores
#   DATA_SEED    which problems are drawn: 42
# Started again with the same OUT, it does not make again what is finished. A run stopped by Ctrl-C saves and resumes;
# one killed outright starts over, because it saves only at its end (trainer.save_freq=10: an RL run saves every 10 steps).
set -euo pipefail
OUT=${1:?the folder to write to}
shift
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}
size=() model=() sft=() rl=() threads=(env)
if [ "${1:-}" = --small ]; then
    shift
    : "${SEEDS:=1}" "${TOGETHER:=1}"
    size=(--max_numbers 3 --max_number 20 --max_target 40)
    generated=(--train_size 1024 --test_size 256)
    worked=(--rows 6000 --texts 16 --largest 40 --distinct)
    model=(--hidden 96 --layers 3 --heads 4 --coarse)
    sft=(data.train_batch_size=32 data.max_length=256 data.max_token_len_per_gpu=8192
        optim.lr=4e-3 optim.lr_warmup_steps=50 trainer.total_training_steps=3000)
    rl=(data.max_prompt_length=16 data.max_response_length=128
        actor_rollout_ref.actor.optim.lr=2e-4 trainer.total_training_steps=40
        actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_coef=0.05
        actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 critic.ppo_max_token_len_per_gpu=8192)
    ppo=(data.train_batch_size=256 actor_rollout_ref.actor.ppo_mini_batch_size=128
        algorithm.use_kl_in_reward=false critic.optim.lr=1e-3)
    grpo=(data.train_batch_size=32 actor_rollout_ref.actor.ppo_mini_batch_size=16)
else
    : "${SEEDS:=1 2 3}" "${TOGETHER:=6}"
    size=(--max_numbers 3)
    ppo=() grpo=() generated=(--train_size 10240 --test_size 512) worked=(--rows 180000)
fi
if [ "$TOGETHER" -gt 1 ]; then # each would take all cores, and wait for the others' threads
    share=$(($(getconf _NPROCESSORS_ONLN) / TOGETHER))
    threads=(env OMP_NUM_THREADS=$((share > 1 ? share : 1)))
fi
DATA=$OUT/data

if [ ! -f "$DATA/worked.parquet" ]; then
    "$PYTHON" -m hone.cli data prepare countdown --local_dir "$DATA" --seed "${DATA_SEED:-42}" \
        "${generated[@]}" "${size[@]}"
    "$PYTHON" "$HERE/worked.py" "$DATA/worked.parquet" --rl "$DATA" "${worked[@]}" "${size[@]}"
fi
[ -d "$OUT/base" ] || "$PYTHON" "$HERE/base_model.py" "$OUT/base" "${model[@]}"
"$PYTHON" -m hone.trainer.main_sft --config-path "$HERE" --config-name reproduce_sft \
    model.path="$OUT/base" data.train_files="$DATA/worked.parquet" \
    trainer.default_local_dir="$OUT/sft" "${sft[@]}"

start() { # algorithm seed overrides…
    local name=$1-$2 algorithm=$1 seed=$2
    shift 2
    "${threads[@]}" "$PYTHON" -m hone.trainer.main_ppo \
        --config-path "$HERE" --config-name "reproduce_$algorithm" \
        actor_rollout_ref.model.path="$OUT/sft" \
        data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
        trainer.seed="$seed" trainer.experiment_name="$name" \
        trainer.default_local_dir="$OUT/$name" "$@"
}
running=0 failed=0
one_ended() { # a run that failed does not stop the others
    wait -n || failed=1
    running=$((running - 1))
}
for seed in $SEEDS; do
    for algorithm in ${ALGORITHMS:-grpo ppo}; do
        extra=("${rl[@]}")
        if [ "$algorithm" = ppo ]; then extra+=("${ppo[@]}"); else extra+=("${grpo[@]}"); fi
        if [ "$TOGETHER" -gt 1 ]; then
            if [ "$running" -ge "$TOGETHER" ]; then one_ended; fi
            mkdir -p "$OUT/logs"
            start "$algorithm" "$seed" "${extra[@]}" "$@" >"$OUT/logs/$algorithm-$seed.log" 2>&1 &
            running=$((running + 1))
        else
            start "$algorithm" "$seed" "${extra[@]}" "$@"
        fi
    done
done
while [ "$running" -gt 0 ]; do one_ended; done
if [ "$failed" = 1 ]; then
    echo "a run failed; see $OUT/logs" >&2
    exit 1
fi
"$PYTHON" "$HERE/curves.py" "$OUT" "$OUT/curves"
