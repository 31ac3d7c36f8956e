"""Small functions that code written for verl imports, against hand-computed numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hone.verl import torch_functional as F


def test_log_probs_and_entropy_of_logits() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    labels = torch.randint(0, 5, (2, 3))
    p = logits.softmax(-1)
    expected = torch.stack([p[i, j, labels[i, j]].log() for i in range(2) for j in range(3)])
    torch.testing.assert_close(F.logprobs_from_logits(logits, labels).flatten(), expected)
    torch.testing.assert_close(F.entropy_from_logits(logits), -(p * p.log()).sum(-1))
    torch.testing.assert_close(
        F.entropy_from_logits_with_chunking(logits.float().flatten(0, 1), 2),
        F.entropy_from_logits(logits.float()).flatten(),
    )
    torch.testing.assert_close(F.calculate_sum_pi_squared_from_logits(logits), (p * p).sum(-1))
    masked_logits = logits.masked_fill(torch.arange(5) == 4, -torch.inf)
    torch.testing.assert_close(
        F.entropy_from_logits(masked_logits), F.entropy_from_logits(logits[..., :4])
    )
    of_response = F.log_probs_from_logits_response(labels, logits, 2)
    torch.testing.assert_close(of_response, F.logprobs_from_logits(logits[:, :2], labels[:, 1:]))


def test_a_response_ends_with_its_first_end_token() -> None:
    ids = torch.tensor([[5, 1, 0, 0], [2, 1, 5, 5], [5, 5, 5, 5]])
    assert F.get_response_mask(ids, [1, 2]).tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [("left", [3, 4, 5]), ("right", [1, 2, 3]), ("middle", [1, 4, 5])],
)
def test_rows_are_padded_or_truncated_to_a_length(truncation: str, expected: list[int]) -> None:
    ids, mask = torch.tensor([[1, 2, 3, 4, 5]]), torch.ones(1, 5)
    assert F.postprocess_data(ids, mask, 3, 0, truncation=truncation)[0].tolist() == [expected]
    padded, padded_mask = F.postprocess_data(ids, mask, 6, 9, truncation=truncation)
    assert (padded.tolist(), padded_mask.tolist()) == ([[9, 1, 2, 3, 4, 5]], [[0, 1, 1, 1, 1, 1]])
    with pytest.raises(NotImplementedError, match="more than max_length=3"):
        F.postprocess_data(ids, mask, 3, 0)


def test_lists_are_padded_on_the_right() -> None:
    assert F.pad_2d_list_to_length([[1], [2, 3]], 0, 3).tolist() == [[1, 0, 0], [2, 3, 0]]
    assert F.remove_pad_token(torch.tensor([[0, 7]]), torch.tensor([[0, 1]])) == [[7]]
    mask = torch.tensor([[0, 0, 1, 1]])
    assert F.compute_position_id_with_mask(mask).tolist() == [[0, 0, 0, 1]]


def test_a_random_mask_is_one_run_of_the_requested_length() -> None:
    mask = F.create_random_mask(torch.zeros(50, 20), 0.8, 0.2, 0.5)
    assert (mask.diff(dim=1).abs().sum(1) <= 2).all()
    assert mask.sum(1).min() >= 10
    assert mask.sum(1).max() <= 16


def test_schedules_start_low_and_end_at_the_floor() -> None:
    def rates(make: object, warmup: int, **kwargs: float | None) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        schedule = make(optimizer, warmup, **kwargs)  # type: ignore[operator]
        actual = []
        for _ in range(5):
            actual.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        return actual

    assert rates(F.get_constant_schedule_with_warmup, 2) == [0.0, 0.5, 1.0, 1.0, 1.0]
    assert rates(F.get_constant_schedule_with_warmup, 0) == [1.0] * 5
    cosine = F.get_cosine_schedule_with_warmup
    decay = [1.0, 0.775, 0.325]
    floor = rates(cosine, 2, num_training_steps=5, min_lr_ratio=0.1)
    assert floor == pytest.approx([0.0, 0.5, *decay])
    start = rates(cosine, 2, num_training_steps=5, min_lr_ratio=0.1, init_lr_ratio=0.1)
    assert start == pytest.approx([0.1, 0.55, *decay])
    no_floor = rates(cosine, 0, num_training_steps=4, min_lr_ratio=None)
    assert no_floor[::2] == pytest.approx([1.0, 0.5, 0.0])


def test_a_mask_of_numbers_weights_the_values() -> None:
    values, weights = torch.tensor([[1.0, 3.0, torch.nan]]), torch.tensor([[0.25, 0.5, 0.0]])
    assert F.masked_sum(values, weights).item() == pytest.approx(1.75)
    assert F.masked_mean(values, weights, 1).tolist() == pytest.approx([1.75 / 0.75])
    assert F.masked_mean(values, weights.bool()).item() == pytest.approx(2.0)
    assert F.masked_mean(values, torch.zeros(1, 3)).item() == 0.0


def test_the_lower_bound_is_applied_after_the_upper_bound() -> None:
    clipped = F.clip_by_value(torch.tensor([0.0, 9.0]), torch.tensor(2.0), torch.tensor(1.0))
    assert clipped.tolist() == [2.0, 2.0]


def test_group_numbers_and_statistics_by_any_label() -> None:
    assert F.as_torch_index(np.array([1.0000001, 2.0, 1.0])).tolist() == [0, 1, 0]
    assert F.as_torch_index(["a", "0042", 42, "a"]).tolist() == [0, 1, 2, 0]
    mean, std, count = F.group_mean_std(torch.tensor([1.0, 2.0, 3.0]), F.as_torch_index([0, 1, 0]))
    assert (mean.tolist(), count.tolist()) == ([2.0, 0.0], [2.0, 1.0])
    assert std.tolist() == pytest.approx([2**0.5, 1.0])


def test_a_value_per_row_is_repeated_along_ragged_rows() -> None:
    rows = torch.nested.as_nested_tensor([torch.zeros(2), torch.zeros(1)], layout=torch.jagged)
    assert F.expand_as_nested(torch.tensor([5, 6]), rows).values().tolist() == [5, 5, 6]
    with pytest.raises(AssertionError, match="one value per row"):
        F.expand_as_nested(torch.zeros(3), rows)


def test_the_size_of_a_model_is_given_in_its_unit(capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(2000, 1)
    assert F.get_model_size(model) == (2.001, "K")
    assert F.get_model_size(model, "") == (2001, "")
    F.print_model_size(model, "critic")
    assert capsys.readouterr().out == "critic contains 2.00K parameters\n"


@pytest.mark.slow
def test_generation_config_is_the_models_own_or_derived(tmp_path: Path) -> None:
    assert F.get_generation_config(str(tmp_path)) is None
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "eos_token_id": 7}')
    derived = F.get_generation_config(str(tmp_path))
    assert derived is not None
    assert derived.eos_token_id == 7
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    own = F.get_generation_config(str(tmp_path))
    assert own is not None
    assert own.eos_token_id == 9


def test_the_learning_rate_rises_stays_and_decays() -> None:
    def rates(**options: float) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        schedule = F.get_wsd_schedule_with_warmup(optimizer, 2, 12, **options)
        values = []
        for _ in range(14):
            values.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        return values

    half = rates(stable_ratio=0.6, min_lr_ratio=0.2)
    assert half[:8] == [0.0, 0.5, *[1.0] * 6]
    assert half[8:12] == pytest.approx([1.0, 0.88284, 0.6, 0.31716], abs=1e-4)
    assert half[12:] == pytest.approx([0.2, 0.2])
    assert rates(stable_ratio=1.0)[:13] == [0.0, 0.5, *[1.0] * 10, 0.0]
