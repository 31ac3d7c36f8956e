"""Functions on dicts, processes and IP addresses, with verl's names and arguments.

In verl, they are in `utils.py_functional`, `utils.net_utils`, `utils.import_utils` and
`utils.checkpoint.checkpoint_manager`.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
import ipaddress
import multiprocessing
import os
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import typing_extensions

from hone.event_loop import run_coroutine
from hone.plugins import load_object
from hone.types import Fields, Function, JsonValue, Settings

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
R = TypeVar("R")
P = ParamSpec("P")


def append_to_dict(data: Fields, new_data: Settings, prefix: str = "") -> None:
    """Appends each value of `new_data` to the list (or `Metric`) that `data` has under `prefix` + its key."""
    for key, value in rename_dict(new_data, prefix).items():
        values = data.setdefault(key, getattr(value, "init_list", list)())
        if isinstance(value, list):
            values.extend(value)
        else:
            values.append(value)


def rename_dict(data: Mapping[str, V], prefix: str = "") -> dict[str, V]:
    """Returns the dict with `prefix` added to the keys that do not start with it."""
    return {k if k.startswith(prefix) else prefix + k: value for k, value in data.items()}


def union_two_dict(dict1: dict[K, V], dict2: Mapping[K, V]) -> dict[K, V]:
    """Adds the second dict to the first, in place; raises if values of a shared key differ."""
    for key in dict1.keys() & dict2.keys():
        if dict1[key] != dict2[key]:
            raise AssertionError(
                f"{key!r} is {dict1[key]!r} in one dict and {dict2[key]!r} in the other"
            )
    dict1.update(dict2)
    return dict1


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[K, V]]) -> dict[K, list[V]]:
    """Converts a list of dicts, which must have the same keys, to a dict of lists."""
    if any(row.keys() != list_of_dict[0].keys() for row in list_of_dict):
        raise AssertionError("the rows do not all have the same keys")
    return {key: [row[key] for row in list_of_dict] for key in (list_of_dict or [{}])[0]}


class NestedNamespace(SimpleNamespace):
    """A namespace with the items of a dict; nested dicts become namespaces too."""

    def __init__(self, dictionary: Fields, **kwargs: JsonValue) -> None:
        super().__init__(**kwargs)
        for key, value in dictionary.items():
            setattr(self, key, NestedNamespace(value) if isinstance(value, dict) else value)


@contextmanager
def temp_env_var(key: str, value: str) -> Iterator[None]:
    """Sets an environment variable while the block runs."""
    old_value = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if old_value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = old_value


def convert_to_regular_types(obj: Any) -> Any:
    """Returns the object with OmegaConf containers and tuples converted to dicts and lists."""
    from omegaconf import DictConfig, ListConfig

    if isinstance(obj, dict | DictConfig):
        return {key: convert_to_regular_types(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple | ListConfig):
        return [convert_to_regular_types(value) for value in obj]
    return obj


def load_class_from_fqn(fqn: str, description: str = "class") -> Any:
    """Returns the object that a dotted name refers to."""
    if "." not in fqn:
        raise ValueError(f"{description} {fqn!r} is not a dotted name such as package.module.Class")
    return load_object(fqn)


def timeout_limit(
    seconds: float, use_signals: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Runs the decorated function in a separate process; raises TimeoutError after `seconds`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run_with_timeout(*arguments: P.args, **options: P.kwargs) -> R:
            context = multiprocessing.get_context("fork")
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_send_result,
                args=(sender, functools.partial(function, *arguments, **options)),
            )
            process.start()
            sender.close()
            try:
                if not receiver.poll(seconds):
                    raise TimeoutError(
                        f"Function {function.__name__} timed out after {seconds} seconds"
                    )
                result, error = receiver.recv()
            except EOFError:
                process.join()
                raise RuntimeError(
                    f"{function.__name__}: its process exited with error (exitcode: "
                    f"{process.exitcode}) before it returned a result"
                ) from None
            finally:
                process.kill()
                process.join()
            if error is not None:
                raise error
            return result

        return run_with_timeout

    return decorate


def _send_result(sender: Connection, call: Callable[[], R]) -> None:
    result: tuple[R | None, Exception | None]
    try:
        result = (call(), None)
    except Exception as error:  # any exception of the function is raised in the caller
        result = (None, error)
    try:
        sender.send(result)
    except Exception as error:  # the result cannot be pickled
        sender.send((None, RuntimeError(f"{result!r} cannot be pickled: {error}")))


def deprecated(replacement: str = "") -> Callable[[Function], Function]:
    """Decorates a function or class: each use emits a FutureWarning that names `replacement`."""

    def decorate(target: Function) -> Function:
        kind = "Class" if isinstance(target, type) else "Function"
        text = f"{kind} '{target.__module__}.{target.__qualname__}' is deprecated."
        text += f" Please use '{replacement}' instead." if replacement else ""
        return typing_extensions.deprecated(text, category=FutureWarning)(target)

    return decorate


def is_ipv4(ip_str: str) -> bool:
    """Returns whether the text is an IPv4 address."""
    return _ip_version(ip_str) == 4


def is_ipv6(ip_str: str) -> bool:
    """Returns whether the text is an IPv6 address."""
    return _ip_version(ip_str) == 6


def _ip_version(text: str) -> int | None:
    try:
        return ipaddress.ip_address(text).version
    except ValueError:
        return None


def should_save_ckpt_esi(
    max_steps_duration: float, save_ckpt_duration: float = 60, redundant_time: float = 0
) -> bool:
    """Returns whether the machine's reservation ends before another step and a checkpoint would finish.

    Volcengine and SageMaker set the end of a reservation in an environment variable.
    """
    needed_s = max_steps_duration + save_ckpt_duration + redundant_time
    if expiration := os.environ.get("MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"):
        try:
            remaining_s = float(expiration) - time.time()
        except ValueError:
            return False
        return max_steps_duration > 0 and 0 < remaining_s <= needed_s
    if expiration := os.environ.get("SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"):
        return int(expiration) - time.time() < needed_s
    return False


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


is_vllm_available = functools.partial(_is_installed, "vllm")
is_sglang_available = functools.partial(_is_installed, "sglang")
is_megatron_core_available = functools.partial(_is_installed, "megatron")
is_trl_available = functools.partial(_is_installed, "trl")
is_nvtx_available = functools.partial(_is_installed, "nvtx")


def auto_await(function: Function) -> Function:
    """Makes an async function callable without `await` where no event loop runs."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return run_coroutine(result) if inspect.iscoroutine(result) else result
        return result

    return call
