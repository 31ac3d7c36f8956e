"""Two rows with known train/rollout ratios, for the tests of rollout correction and its metrics."""

from __future__ import annotations

import numpy as np
import torch

from hone.algorithms.correction import importance_weights

# train/rollout ratios of two rows; the last column is padding
RATIO = np.array([[0.5, 4.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
ROLLOUT = torch.full((2, 4), -1.0, dtype=torch.float64)
OLD = ROLLOUT + torch.from_numpy(np.log(RATIO))


def options(**kw):
    return {
        "rollout_is": None,
        "rollout_is_threshold": 2.0,
        "rollout_rs": None,
        "rollout_rs_threshold": None,
        "rollout_is_batch_normalize": False,
        **kw,
    }


def weights(level, threshold):
    return importance_weights(OLD - ROLLOUT, MASK, level, threshold)
