from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hone.tracking import MetricsFile
from hone.tracking.curve import draw_curve

pytestmark = pytest.mark.slow


def make_run(folder: Path, slope: float, steps: int = 30) -> Path:
    file = MetricsFile(folder / "metrics.jsonl")
    for step in range(steps):
        metrics = {"reward/mean": slope * step}
        if step % 10 == 0:
            metrics["val-core/x/acc/mean@1"] = slope * step
        file.append(metrics, step)
    return file.path


def pixels(png: Path) -> tuple[int, int, bytes]:
    from PIL import Image

    with Image.open(png) as image:
        return (*image.size, image.convert("RGB").tobytes())


def test_one_run_is_drawn_from_its_file_or_its_folder(tmp_path: Path) -> None:
    file = make_run(tmp_path / "a", 1.0)
    keys = ["reward/mean", "val-core/x/acc/mean@1"]
    one = draw_curve(file, keys, tmp_path / "one.png", "learning")
    two = draw_curve(file.parent, keys, tmp_path / "deep" / "two.png", "learning")
    assert one.read_bytes().startswith(b"\x89PNG")
    assert pixels(one) == pixels(two)
    assert pixels(one)[0] > 500


def test_several_runs_overlay_and_labels_are_drawn(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a", 1.0), make_run(tmp_path / "b", 2.0)
    alone = draw_curve(a, ["reward/mean"], tmp_path / "alone.png", "t")
    both = draw_curve([a, b], ["reward/mean"], tmp_path / "both.png", "t")
    named = draw_curve({"slow": a, "fast": b}, ["reward/mean"], tmp_path / "named.png", "t")
    assert len({pixels(png)[2] for png in (alone, both, named)}) == 3


def test_smoothing_changes_the_picture(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", 1.0)
    raw = draw_curve(a, ["reward/mean"], tmp_path / "raw.png", "t", smoothing=0.0)
    soft = draw_curve(a, ["reward/mean"], tmp_path / "soft.png", "t", smoothing=0.9)
    assert pixels(raw) != pixels(soft)


def test_an_unknown_key_is_an_error_with_suggestions(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", 1.0)
    with pytest.raises(ValueError, match="'reward/maen'; similar: reward/mean"):
        draw_curve(a, ["reward/maen"], tmp_path / "x.png", "t")
    assert not (tmp_path / "x.png").exists()


def test_a_run_without_a_key_is_not_drawn_in_its_panel(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", 1.0)
    other = MetricsFile(tmp_path / "b" / "metrics.jsonl")
    other.append({"train/loss": 1.0}, 1)
    assert draw_curve([a, other.path], ["train/loss"], tmp_path / "x.png", "t").is_file()


def test_drawing_needs_no_display_and_does_not_import_pyplot(tmp_path: Path) -> None:
    import subprocess

    a = make_run(tmp_path / "a", 1.0, steps=3)
    code = (
        "import sys; from hone.tracking.curve import draw_curve;"
        f"draw_curve({str(a)!r}, ['reward/mean'], {str(tmp_path / 'x.png')!r}, 't');"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=280)


def test_held_out_metrics_are_never_smoothed(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(30):
        file.append({"val-core/x/acc/mean@1": float(step % 2)}, step)
    pictures = [
        draw_curve(file.path, ["val-core/x/acc/mean@1"], tmp_path / f"{w}.png", "t", smoothing=w)
        for w in (0.0, 0.9)
    ]
    assert pixels(pictures[0]) == pixels(pictures[1])
