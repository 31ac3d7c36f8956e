"""Opens the URLs of services: rewards, retrieval, sandbox and search clients."""

from __future__ import annotations

import functools
import urllib.request
from urllib.parse import urlsplit


@functools.cache
def service_opener(
    url: str, *handlers: type[urllib.request.BaseHandler]
) -> urllib.request.OpenerDirector:
    """Returns a URL opener with `handlers`, and without a proxy for a service on this machine."""
    is_local = urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost")
    proxies = [urllib.request.ProxyHandler({})] if is_local else []
    return urllib.request.build_opener(*handlers, *proxies)
