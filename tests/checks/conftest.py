"""The tiny policy and task of the trainer's tests."""

from tests.trainer.conftest import task as task
