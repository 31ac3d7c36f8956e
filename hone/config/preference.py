"""The tree `dpo_trainer`: training on preferences, as pairs (DPO and others) or labelled responses (KTO)."""

from __future__ import annotations

from typing import Annotated

from hone.config.block import SchemaBlock, block
from hone.config.engine import OptimConfig
from hone.config.ranges import NotNegative, Positive, Range
from hone.config.sft import PairDataConfig, SFTTrainerSection, SupervisedConfig

UNPAIRED_LOSSES = ("kto", "apo_zero_unpaired")
"""The built-in losses over single responses with a label."""
SwappedShare = Annotated[float, Range(least=0, most=0.49)]


class PreferenceLossConfig(SchemaBlock):
    """The preference loss; TRL's names."""

    loss_type: str = "sigmoid"
    """sigmoid (DPO), sigmoid_norm, ipo, hinge, robust, apo_zero, apo_down, simpo, orpo, cpo; kto and
    apo_zero_unpaired for labelled responses; or your own as pkg.mod:object."""
    beta: Positive = 0.1
    """Strength β of the bond to the reference; SimPO uses 2 to 2.5, ORPO weighs its odds ratio with it."""
    label_smoothing: SwappedShare = 0.0
    """robust: the share ε of pairs that are believed to be swapped."""
    simpo_gamma: NotNegative = 0.5
    """simpo: the reward margin γ by which the chosen response must win."""
    cpo_alpha: NotNegative = 1.0
    """cpo: weight α of the chosen response's NLL per token."""
    desirable_weight: NotNegative = 1.0
    """kto, apo_zero_unpaired: weight of desirable responses."""
    undesirable_weight: NotNegative = 1.0
    """kto, apo_zero_unpaired: weight of undesirable responses."""


class PreferenceDataConfig(PairDataConfig):
    """Pairs of a preferred and a rejected response, or responses with a label."""

    completion_key: str = "completion"
    """kto, apo_zero_unpaired: column of the response: text, messages, or a whole dialogue if there is no
    prompt."""
    label_key: str = "label"
    """kto, apo_zero_unpaired: column of the label, true for a desirable response."""


class DPOConfig(SupervisedConfig):
    """The config of a run that trains a policy on preferences."""

    data: PreferenceDataConfig = block(
        PreferenceDataConfig, train_files=("~/data/preferences/train.parquet",)
    )
    algorithm: PreferenceLossConfig = block(PreferenceLossConfig)
    optim: OptimConfig = block(OptimConfig, lr=1e-6, betas=(0.9, 0.95), lr_warmup_steps_ratio=0.1)
    trainer: SFTTrainerSection = block(
        SFTTrainerSection, project_name="preferences", experiment_name="dpo", total_epochs=1
    )

    @property
    def has_pairs(self) -> bool:
        """Whether a row is a pair, as far as the name of the loss tells."""
        return self.algorithm.loss_type not in UNPAIRED_LOSSES
