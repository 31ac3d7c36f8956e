#!/usr/bin/env bash
# Search-R1 in a closed world: SFT on the tags, then GRPO with a real, an oracle and a random retriever; PPO with the real one.
#   run.sh WIKI_CORPUS MODEL OUT   WIKI_CORPUS has passages.jsonl.gz and questions.jsonl.gz; MODEL is SmolLM2-135M
#   run.sh --small OUT             a made-up world and a fresh model: minutes on two CPU cores
# Further key=value overrides go to every RL run. The environment may say
#   SEED    1                      CELLS   "real oracle random", or ppo; they run at the same time on one GPU
#   SFT     key=value overrides of the SFT, apart by spaces
#   PORT    8101, and those after it for the other retrievers
# Started again with the same OUT, it does not make again what is finished.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python3} SEED=${SEED:-1} CELLS=${CELLS:-real oracle random} PORT=${PORT:-8101}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if [ "${1:?WIKI_CORPUS MODEL OUT, or --small OUT}" = --small ]; then
    OUT=${2:?the folder to write to} MODEL=$OUT/base CORPUS=$OUT/world/passages.jsonl.gz
    world=(--made-up "$OUT/world" --demonstrations 6000 --topk 1)
    sft=(data.max_length=128 optim.lr=3e-3 trainer.total_training_steps=1200)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    rl=(data.train_batch_size=32 data.max_prompt_length=16 data.max_response_length=96
        actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.optim.lr=3e-4
        actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192
        actor_rollout_ref.rollout.max_tokens_per_turn=24 retriever.topk=1
        trainer.total_training_steps=20)
    ppo=(data.train_batch_size=256 actor_rollout_ref.rollout.n=1
        actor_rollout_ref.actor.ppo_mini_batch_size=128 critic.ppo_mini_batch_size=128
        critic.ppo_max_token_len_per_gpu=8192 critic.optim.lr=1e-3)
    shift 2
else
    MODEL=${2:?the model folder} OUT=${3:?the folder to write to} CORPUS=$1/passages.jsonl.gz
    world=("$1" "$OUT/world") sft=() rl=() ppo=()
    shift 3
fi

[ -f "$OUT/world/world.json" ] || "$PYTHON" "$HERE/world.py" "${world[@]}"
[ ! -f "$OUT/world/world.json" ] || cat "$OUT/world/world.json"
[ -d "$MODEL" ] || "$PYTHON" "$HERE/small_model.py" "$MODEL"
"$PYTHON" -m hone.trainer.main_sft --config-path "$HERE" --config-name sft \
    model.path="$MODEL" data.train_files="$OUT/world/sft.jsonl" \
    trainer.default_local_dir="$OUT/sft" "${sft[@]}" ${SFT:-}

retrievers=()
trap 'kill "${retrievers[@]}" 2>/dev/null || true' EXIT
mkdir -p "$OUT/logs"
port=$PORT cells=() failed=0
for cell in $CELLS; do
    config=closed_world retriever=$cell own=("${rl[@]}")
    [ "$cell" != ppo ] || { config=closed_world_ppo retriever=real own+=("${ppo[@]}"); }
    CUDA_VISIBLE_DEVICES='' "$PYTHON" "$HERE/retrievers.py" "$retriever" --world "$OUT/world" \
        --corpus "$CORPUS" --port "$port" >"$OUT/logs/retriever-$cell.log" 2>&1 &
    retrievers+=($!)
    while kill -0 "$!" 2>/dev/null && ! (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do sleep 0.2; done
    "$PYTHON" -m hone.trainer.main_ppo --config-path "$HERE" --config-name "$config" \
        actor_rollout_ref.model.path="$OUT/sft" \
        data.train_files="$OUT/world/train.jsonl" data.val_files="$OUT/world/test.jsonl" \
        retriever.url="http://127.0.0.1:$port/retrieve" trainer.seed="$SEED" \
        trainer.experiment_name="$cell-$SEED" trainer.default_local_dir="$OUT/$cell-$SEED" \
        "${own[@]}" "$@" >"$OUT/logs/$cell-$SEED.log" 2>&1 &
    cells+=($!)
    port=$((port + 1))
done
for cell in "${cells[@]}"; do wait "$cell" || failed=1; done
"$PYTHON" "$HERE/cells.py" "$OUT/curves" "$OUT"
exit "$failed"
