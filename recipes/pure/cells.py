"""Runs cells of the recipe one after another in this process, and makes a table and a picture of them.

Usage: python recipes/pure/cells.py run OUT CELL-SEED… [key=value…] (OUT has world/, sft/ and prm/)
       python recipes/pure/cells.py collect RESULT OUT… (writes RESULT/CELL-SEED.json of every finished run,
       prints a table of them, and draws RESULT.png with matplotlib; OUT may be such a RESULT)
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FORMS = {"gamma": "gamma-decay", "strict": "strict min-form", "soft": "0.1"}
JUDGES = ("prm", "prmvr", "oracle", "noisy")
CELLS = (
    "vr", "prime",
    *(f"{form}-{judge}" for judge in ("prm", "prmvr") for form in FORMS),
    *(f"{form}-{judge}" for judge in ("oracle", "noisy") for form in ("gamma", "soft")),
)  # fmt: skip
SOURCE = "val-aux/chains/{}/mean@1"
HELD_OUT = {
    "accuracy": "val-core/chains/acc/mean@1",
    "steps": SOURCE.format("steps"),
    "restated": SOURCE.format("restated"),
    "right_steps": SOURCE.format("right_steps"),
}
TRAINING = {
    "prm_reward": "instant_rewards/outcome_reward/mean",
    "prm_agrees": "instant_rewards/orm_match_vr",
    "steps": "num_of_steps/mean",
    "length": "response_length/mean",
    "clipped": "response_length/clip_ratio",
    "entropy": "actor/entropy",
    "implicit_reward": "reward_model/raw_reward",
    "implicit_agrees": "reward_model/dpo_acc_abs",
}
COLORS = {
    "gamma": "#c2553a",
    "strict": "#2f6f9f",
    "soft": "#3a8f5c",
    "vr": "#444444",
    "prime": "#8a5fb0",
}


def overrides_of(cell: str, out: Path) -> list[str]:
    """The settings in which a cell differs from pure.yaml."""
    form, _, judge = cell.partition("-")
    if cell == "vr":
        return []
    if cell == "prime":
        return [
            "algorithm.adv_estimator=rloo",
            "algorithm.adv_norm=false",
            "reward_model.enable=true",
            "reward_model.type=prime",
            f"reward_model.model.path={out / 'sft'}",
            "reward_model.model.optim.lr=3e-4",
        ]
    # The rule's weight is 0 where the steps alone are rewarded; its score is still measured.
    return [
        "reward_model.enable=true",
        "reward_model.type=prm",
        f"reward_model.model.path={out / 'prm'}",
        f"reward_model.credit_assignment={FORMS[form]}",
        f"reward_model.verifiable_reward_coef={float(judge == 'prmvr')}",
    ]


def run_cell(cell: str, seed: str, out: Path, more: list[str]) -> None:
    from hone.controller import Role
    from hone.models.load import load_tokenizer
    from hone.trainer.ppo.plan import Plan
    from hone.trainer.ppo.roles import default_roles
    from hone.trainer.ppo.trainer import PPOTrainer
    from hone.verl.dialect import load_config

    config = load_config(
        [
            f"actor_rollout_ref.model.path={out / 'sft'}",
            f"data.train_files={out / 'world' / 'train.jsonl'}",
            f"data.val_files={out / 'world' / 'test.jsonl'}",
            f"custom_reward_function.path={HERE / 'world.py'}",
            f"trainer.seed={seed}",
            f"trainer.experiment_name={cell}-{seed}",
            f"trainer.default_local_dir={out / 'runs' / f'{cell}-{seed}'}",
            *overrides_of(cell, out),
            *more,
        ],
        config_name="pure",
        config_path=HERE,
    )
    roles = default_roles(Plan.of(config), lora=False)
    if cell.endswith(("oracle", "noisy")):
        from oracle import NoisyPRM, OraclePRM

        roles[Role.RewardModel] = NoisyPRM if cell.endswith("noisy") else OraclePRM
    model = str(out / "sft")
    trainer = PPOTrainer(config, load_tokenizer(model), role_worker_mapping=roles)
    try:
        trainer.init_workers()
        trainer.fit()
    finally:
        trainer.shutdown()


def curves(folder: Path) -> dict[str, Any]:
    """The numbers of one run."""
    from hone.tracking import read_metrics

    lines = read_metrics(folder)
    steps = [line for line in lines if "training/global_step" in line]
    accuracy = "instant_rewards/verifiable_reward/mean"  # without a reward model it is the score
    if steps and accuracy not in steps[0]:
        accuracy = "critic/score/mean"
    return {
        "cell": folder.name,
        "held_out": [
            {"step": line["step"]} | {name: round(line[key], 4) for name, key in HELD_OUT.items()}
            for line in lines
            if HELD_OUT["accuracy"] in line
        ],
        "training": {
            name: [round(line[key], 4) for line in steps]
            for name, key in ({"accuracy": accuracy} | TRAINING).items()
            if steps and key in steps[0]
        },
        "seconds": float((folder / "done").read_text()),  # workers' start and steps
    }


def collect(place: Path) -> list[dict[str, Any]]:
    """The finished runs of a folder of runs, or of a folder that an earlier call wrote."""
    written = sorted(place.glob("*-*.json"))
    if written:
        return [json.loads(file.read_text(encoding="utf-8")) for file in written]
    return [curves(file.parent) for file in sorted(place.glob("runs/*/done"))]


def table(cells: list[dict[str, Any]]) -> str:
    """One line per cell: means over the first and the last five steps of training, seed by seed."""
    lines = defaultdict(list)
    for cell in cells:
        lines[cell["cell"].rpartition("-")[0]].append(cell)
    text = "| Cell | Accuracy (%) | Held out (%) | Judge's reward | Steps | Tokens | Seconds |\n"
    text += "|---|---|---|---|---|---|---|\n"
    for name in (name for name in CELLS if name in lines):
        runs = lines[name]

        def change(key: str, form: str, factor: float = 1.0, runs: Any = runs) -> str:
            series = [run["training"][key] for run in runs if key in run["training"]]
            if not series:
                return ""
            first = sum(sum(values[:5]) / len(values[:5]) for values in series) / len(series)
            last = (format(factor * sum(v[-5:]) / len(v[-5:]), form) for v in series)
            return f"{factor * first:{form}} → {', '.join(last)}"

        held = ", ".join(f"{100 * run['held_out'][-1]['accuracy']:.0f}" for run in runs)
        cells_of_line = [
            f"`{name}`", change("accuracy", ".0f", 100), held, change("prm_reward", ".2f"),
            change("steps", ".1f"), change("length", ".0f"),
            f"{max(run['seconds'] for run in runs):.0f}",
        ]  # fmt: skip
        text += f"| {' | '.join(cells_of_line)} |\n"
    return text


def draw(cells: list[dict[str, Any]], out: Path) -> None:
    """A row of panels per judge: true accuracy, judge's reward, steps, length."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 11), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(JUDGES), 4, sharex=True, sharey="col")
    titles = (
        "accuracy (%, training samples)",
        "judge's reward of a response",
        "steps (held out)",
        "length (tokens)",
    )
    for row, judge in zip(panels, JUDGES, strict=True):
        for cell in cells:
            name, _, seed = cell["cell"].rpartition("-")
            form, _, of = name.partition("-")
            if of != judge and name not in ("vr", "prime"):
                continue
            style = {"color": COLORS[form], "label": form if seed == "1" else None, "lw": 1.1}
            seen, held = cell["training"], cell["held_out"]
            row[0].plot([100 * v for v in seen["accuracy"]], **style)
            if "prm_reward" in seen and of == judge:
                row[1].plot(seen["prm_reward"], **style)
            row[2].plot([p["step"] for p in held], [p["steps"] for p in held], **style)
            row[3].plot(seen["length"], **style)
        row[0].set_ylabel(judge)
        for panel, title in zip(row, titles, strict=True):
            panel.set_title(title if judge == JUDGES[0] else "", fontsize=9, loc="left")
            panel.grid(alpha=0.25, linewidth=0.6)
            panel.spines[["top", "right"]].set_visible(False)
        if row[0].lines:
            row[0].legend(frameon=False, fontsize=7)
    for panel in panels[-1]:
        panel.set_xlabel("step")
    figure.savefig(out, dpi=110)


def main() -> None:
    verb, target, *words = sys.argv[1:]
    if verb == "run":
        out, more, failed = Path(target).resolve(), [w for w in words if "=" in w], False
        for word in (w for w in words if "=" not in w):
            cell, _, seed = word.rpartition("-")
            if cell not in CELLS:
                sys.exit(f"there is no cell {cell!r}; there are {', '.join(CELLS)}")
            done = out / "runs" / word / "done"
            if done.exists():
                continue
            try:
                started = time.monotonic()
                run_cell(cell, seed, out, more)
                done.write_text(f"{time.monotonic() - started:.1f}\n", encoding="utf-8")
            except Exception:
                failed = True
                traceback.print_exc()
        sys.exit(failed)
    cells = [cell for place in words for cell in collect(Path(place))]
    result = Path(target)
    result.mkdir(parents=True, exist_ok=True)
    for cell in cells:
        file = result / f"{cell['cell']}.json"
        file.write_text(json.dumps(cell) + "\n", encoding="utf-8")
    sys.stdout.write(table(cells))
    try:
        draw(cells, result.with_suffix(".png"))
    except ModuleNotFoundError as missing:
        sys.stdout.write(f"no picture: {missing}; pip install matplotlib\n")


if __name__ == "__main__":
    main()
