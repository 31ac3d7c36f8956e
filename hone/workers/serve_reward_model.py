"""`hone serve-rm MODEL`: serves an outcome reward model, for runs with `reward_model.server.url`.

The server answers vLLM's `POST /classify` (rendered conversations) and `POST /score` (prompt and response)
with the raw logit of the head, and `GET /health` with the model's name. It uses plain HTTP without
authentication, on loopback by default.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

from hone import program_dialect
from hone.config import ConfigError, load_config
from hone.rewards.conversation import escape_special_tokens
from hone.services.json_server import HOST_NAME_HELP, Caller, JsonServer, Slots
from hone.text import clean_text
from hone.types import JsonObject, JsonValue
from hone.workers.reward_model import RewardModelWorker

log = logging.getLogger(__name__)
MAX_BODY_BYTES = 64 << 20
MAX_TEXTS, MAX_TEXT_CHARACTERS = 10_000, 1 << 20
"""The limits of one request; a tokenizer needs up to 300 bytes of memory per character."""
_ROWS_PER_STEP = 16
"""Rows that are encoded and scored together; a request whose client hangs up ends after them."""


class Service:
    """Answers requests with one model, one at a time; one thread scores."""

    def __init__(self, worker: RewardModelWorker) -> None:
        self._worker = worker
        self._slot = Slots(1)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="score")

    def server(self, host: str, port: int, host_names: Sequence[str] = ()) -> JsonServer:
        """Returns a server of this service, which listens."""
        return JsonServer(
            host,
            port,
            posts={"/classify": self._classify, "/score": self._score},
            gets={"/health": self._health},
            max_body_bytes=MAX_BODY_BYTES,
            host_names=host_names,
        )

    def _classify(self, body: JsonObject, caller: Caller) -> JsonObject:
        texts = _text_list(body, "input")
        if self._worker.reads_pairs:
            raise ValueError("this model reads pairs of texts; use reward_model.server.kind=score")
        add_special_tokens = bool(body.get("add_special_tokens", True))
        encode = partial(self._worker.tokenizer.encode, add_special_tokens=add_special_tokens)
        scores = self._score_rows((list(encode(text)) for text in texts), caller)
        data: list[JsonValue] = [{"index": i, "probs": [score]} for i, score in enumerate(scores)]
        return {"object": "list", "data": data}

    def _score(self, body: JsonObject, caller: Caller) -> JsonObject:
        scores = self._score_rows(self._encode_pairs(body), caller)
        data: list[JsonValue] = [{"index": i, "score": score} for i, score in enumerate(scores)]
        return {"object": "list", "data": data}

    def _score_rows(self, rows: Iterator[list[int]], caller: Caller) -> list[float]:
        """Encodes and scores some rows at a time; raises ClientDisconnected if nobody waits any more."""
        scores: list[float] = []
        with caller.hold(self._slot):
            while step_rows := list(islice(rows, _ROWS_PER_STEP)):
                caller.check()
                scores += self._executor.submit(self._worker.score_rows, step_rows).result()
        return scores

    def _health(self) -> JsonObject:
        return {"model": self._worker.config.reward_model.model.path}

    def _encode_pairs(self, body: JsonObject) -> Iterator[list[int]]:
        """Returns the tokens of each pair; checks the texts of all pairs before."""
        worker = self._worker
        prompts = _text_list(body, "text_1")
        responses = _text_list(body, "text_2", may_be_empty=True)
        if len(prompts) == 1 and responses:  # as in vLLM, a single prompt belongs to all responses
            prompts *= len(responses)
        if len(prompts) != len(responses):
            raise ValueError(f"{len(prompts)} texts in text_1, and {len(responses)} in text_2")

        def encode(prompt: str, response: str) -> list[int]:
            conversation = [{"role": "user", "content": prompt}]
            return worker.encode(conversation, escape_special_tokens(response, worker.tokenizer))

        return map(encode, prompts, responses)


def _text_list(body: JsonObject, key: str, *, may_be_empty: bool = False) -> list[str]:
    """Returns the texts under a key of the request; raises ValueError unless they are a text or a list."""
    texts: Any = body.get(key)
    texts = [texts] if isinstance(texts, str) else texts
    is_list = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    if not is_list or not (may_be_empty or all(texts)):
        raise ValueError(f"{key} must be a list of {'' if may_be_empty else 'non-empty '}texts")
    if len(texts) > MAX_TEXTS:
        raise ValueError(
            f"{key} has {len(texts)} texts; send {MAX_TEXTS} or fewer (reward_model.server.batch_size)"
        )
    longest = max(map(len, texts), default=0)
    if longest > MAX_TEXT_CHARACTERS:
        raise ValueError(
            f"a text in {key} has {longest:,} characters; at most {MAX_TEXT_CHARACTERS:,} are scored"
        )
    return list(map(clean_text, texts))


def load_worker(model: str, overrides: Sequence[str] = ()) -> RewardModelWorker:
    """Loads the model as a run would; an override is `key=value`, such as `reward_model.max_length=4096`."""
    fixed_overrides = [
        "reward_model.enable=true",
        "reward_model.type=orm",
        f"reward_model.model.path={model}",
        "reward_model.model.input_tokenizer=null",
    ]
    worker = RewardModelWorker(
        load_config([*fixed_overrides, *overrides], dialect=program_dialect())
    )
    worker.init_model()
    return worker


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hone serve-rm", description="Serve the scores of an outcome reward model over HTTP."
    )
    parser.add_argument("model", help="folder or hub name of a classifier with one label")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument(
        "--name", action="append", default=[], dest="host_names", help=HOST_NAME_HELP
    )
    overrides_help = "config overrides, as for training"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=overrides_help)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    flags = build_parser().parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    service = Service(load_worker(flags.model, flags.overrides))
    try:
        server = service.server(flags.host, flags.port, flags.host_names)
    except OSError as error:
        address, reason = f"{flags.host}:{flags.port}", error.strerror
        raise ConfigError(f"cannot listen at {address} ({reason}); use --port") from None
    log.info("reward_model.server.url=%s", server.address)
    server.serve_until_interrupted()
    return 0
