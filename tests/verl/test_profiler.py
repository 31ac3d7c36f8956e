"""verl's timers measure time; verl's markers do nothing."""

from __future__ import annotations

import logging

import pytest

from hone.verl import profiler


def test_timers_add_up_also_through_an_exception() -> None:
    timing: dict[str, float] = {}
    with profiler.simple_timer("gen", timing):
        pass
    first = timing["gen"]
    with pytest.raises(ValueError, match="x"), profiler.marked_timer("gen", timing, color="red"):
        raise ValueError("x")
    assert timing["gen"] > first > 0
    with pytest.raises(TypeError, match="colour"):
        profiler.marked_timer("gen", timing, colour="red")  # type: ignore[call-arg]


def test_decorators_do_not_change_the_function() -> None:
    def one() -> int:
        return 1

    assert profiler.rollout_trace_op(one) is one
    assert profiler.mark_annotate(message="m", color="red")(one) is one
    assert profiler.GPUMemoryLogger(role="actor")(one)() == 1
    with profiler.rollout_trace_attr(sample_index=1, step=2, rollout_n=0):
        profiler.mark_end_range(profiler.mark_start_range(message="m"))


def test_a_profiler_of_one_worker_is_disabled_or_refused() -> None:
    role_profiler = profiler.DistProfiler(0, config=profiler.ProfilerConfig(ranks=[0]))
    role_profiler.start(role="actor")
    role_profiler.stop()
    profiler.DistProfiler(0, None, {"tool": "nsys"}).start()
    with pytest.raises(NotImplementedError, match="global_profiler"):
        profiler.DistProfiler(0, config=profiler.ProfilerConfig(enable=True))


def test_a_trace_backend_is_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    profiler.RolloutTraceConfig.init("p", "e", None)
    assert not caplog.records
    profiler.RolloutTraceConfig.init("p", "e", "weave")
    assert "not sent to weave" in caplog.text
    assert profiler.RolloutTraceConfig.get_backend() is None


def test_lines_and_log_records_name_the_rank(
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profiler.LocalLogger().log({"a": 1.5, "b": "text"}, step=2)
    profiler.print_with_rank("hi", rank=1)
    profiler.print_rank_0("first")
    monkeypatch.setenv("RANK", "1")
    profiler.print_rank_0("second")
    assert capsys.readouterr().out == "step:2 - a:1.5\n[Rank 1] hi\nfirst\n"
    logger = logging.getLogger("ranks")
    profiler.log_with_rank("first", 0, logger, logging.WARNING, log_only_rank_0=True)
    profiler.log_with_rank("second", 1, logger, logging.WARNING, log_only_rank_0=True)
    assert [record.getMessage() for record in caplog.records] == ["[Rank 0] first"]
