"""verl's `model_merger` command does what `hone export` does."""

from __future__ import annotations

import pytest

from hone.config import ConfigError
from hone.trainer import export as exports
from hone.trainer.model_merger import main

MERGE = ["merge", "--backend", "fsdp", "--local_dir", "run/global_step_2/actor"]


@pytest.mark.parametrize(
    "more", [[], ["--trust-remote-code"], ["--use_cpu_initialization", "--tie-word-embedding"]]
)
def test_merge_exports(monkeypatch: pytest.MonkeyPatch, more: list[str]) -> None:
    asked: list[tuple[str, str, bool]] = []

    def export(checkpoint: str, out: str, *, trust_remote_code: bool) -> str:
        asked.append((checkpoint, out, trust_remote_code))
        return out

    monkeypatch.setattr(exports, "export", export)
    main([*MERGE, "--target_dir", "merged", *more])
    main([*MERGE[1:], *more])  # older scripts name no operation
    checkpoint, trust = MERGE[-1], "--trust-remote-code" in more
    assert asked == [(checkpoint, "merged", trust), (checkpoint, "tmp", trust)]


def test_what_it_does_not_do_is_said() -> None:
    with pytest.raises(ConfigError, match=r"hone export run.* --push me/it"):
        main([*MERGE, "--hf_upload_path", "me/it"])
    with pytest.raises(ConfigError, match="is not built"):
        main(["test", *MERGE[1:], "--test_hf_dir", "other"])
