"""`hone serve-rm MODEL`: serves an outcome reward model, for runs with `reward_model.server.url`.

The server answers vLLM's `POST /classify` (rendered conversations) and `POST /score` (prompt and response)
with the raw logit of the head, and `GET /health` with the model's name. It uses plain HTTP without
authentication, on loopback by default.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from hone.config import ConfigError, load_config
from hone.rewards.conversation import escape_special_tokens
from hone.types import JsonObject
from hone.workers.reward_model import RewardModelWorker

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)
MAX_BODY_BYTES = 64 << 20


class Service:
    """Answers requests with one model; one thread scores them in the order of arrival."""

    def __init__(self, worker: RewardModelWorker) -> None:
        self._worker = worker
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="score")

    def application(self) -> web.Application:
        from aiohttp import web

        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/classify", self._answer)
        app.router.add_post("/score", self._answer)
        app.router.add_get("/health", self._health)
        return app

    async def _answer(self, request: web.Request) -> web.Response:
        """Answers `/classify` or `/score`; an invalid request gets status 400."""
        from aiohttp import web

        is_classify = request.path == "/classify"
        encode_body = self._encode_texts if is_classify else self._encode_pairs

        def score_body(body: JsonObject) -> list[float]:
            return self._worker.score_rows(encode_body(body))

        try:
            body = await request.json()
            loop = asyncio.get_running_loop()
            scores = await loop.run_in_executor(self._executor, score_body, body)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=400)
        data: list[JsonObject] = [
            {"index": i, "probs": [score]} if is_classify else {"index": i, "score": score}
            for i, score in enumerate(scores)
        ]
        return web.json_response({"object": "list", "data": data})

    async def _health(self, _: web.Request) -> web.Response:
        from aiohttp import web

        return web.json_response({"model": self._worker.config.reward_model.model.path})

    def _encode_texts(self, body: JsonObject) -> list[list[int]]:
        texts = _text_list(body, "input")
        if self._worker.reads_pairs:
            raise ValueError("this model reads pairs of texts; use reward_model.server.kind=score")
        add_special_tokens = bool(body.get("add_special_tokens", True))
        encode = self._worker.tokenizer.encode
        return [list(encode(text, add_special_tokens=add_special_tokens)) for text in texts]

    def _encode_pairs(self, body: JsonObject) -> list[list[int]]:
        worker = self._worker
        prompts = _text_list(body, "text_1")
        responses = _text_list(body, "text_2", may_be_empty=True)
        if len(prompts) == 1 and responses:  # as in vLLM, a single prompt belongs to all responses
            prompts *= len(responses)
        conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
        texts = [escape_special_tokens(response, worker.tokenizer) for response in responses]
        return [worker.encode(*pair) for pair in zip(conversations, texts, strict=True)]


def _text_list(body: JsonObject, key: str, *, may_be_empty: bool = False) -> list[str]:
    """Returns the texts under a key of the request; raises ValueError unless they are a text or a list."""
    texts: Any = body[key]
    texts = [texts] if isinstance(texts, str) else texts
    is_list = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    if not is_list or not (may_be_empty or all(texts)):
        raise ValueError(f"{key} must be a list of {'' if may_be_empty else 'non-empty '}texts")
    return list(texts)


def load_worker(model: str, overrides: Sequence[str] = ()) -> RewardModelWorker:
    """Loads the model as a run would; an override is `key=value`, such as `reward_model.max_length=4096`."""
    fixed_overrides = [
        "reward_model.enable=true",
        "reward_model.type=orm",
        f"reward_model.model.path={model}",
        "reward_model.model.input_tokenizer=null",
    ]
    worker = RewardModelWorker(load_config([*fixed_overrides, *overrides]))
    worker.init_model()
    return worker


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hone serve-rm", description="Serve the scores of an outcome reward model over HTTP."
    )
    parser.add_argument("model", help="folder or hub name of a classifier with one label")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001)
    overrides_help = "config overrides, as for training"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=overrides_help)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    flags = build_parser().parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    from aiohttp import web

    app = Service(load_worker(flags.model, flags.overrides)).application()
    log.info("reward_model.server.url=http://%s:%s", flags.host, flags.port)
    try:
        web.run_app(app, host=flags.host, port=flags.port, print=None, access_log=None)
    except OSError as error:
        address, reason = f"{flags.host}:{flags.port}", error.strerror
        raise ConfigError(f"cannot listen at {address} ({reason}); use --port") from None
    return 0
