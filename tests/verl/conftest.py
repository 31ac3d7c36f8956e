"""The tiny policy and task of the trainer's tests, and the batches of the rewards' tests."""

from tests.rewards.conftest import make_batch as make_batch
from tests.rewards.conftest import tokenizer as tokenizer
from tests.trainer.conftest import task as task
