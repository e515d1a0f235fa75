"""The connections to a model's servers.

The SDK's pool looks at all its connections for every request, so that a thousand requests at once cost 10 ms of
processor time each (m). Here the connections lie in lanes of 32, each with a pool of its own.
"""

from __future__ import annotations

import asyncio
import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kimi_ray.errors import ProviderError
from kimi_ray.llm.models import ModelSettings, is_loopback

if TYPE_CHECKING:
    import openai

MAX_CONNECTIONS = 10_000
CONNECT_TIMEOUT_S = 30.0
LANE_CONNECTIONS = 32


class Lane:
    """A pool of at most ``LANE_CONNECTIONS`` requests at once, and the SDK's clients on it, one an address."""

    __slots__ = ("_connections", "_http", "_sdk", "in_use", "places")

    def __init__(self, connections: Connections, http: Any, places: asyncio.Semaphore) -> None:
        self._connections = connections
        self.places = places
        self._http = http
        self._sdk: dict[int, openai.AsyncOpenAI] = {}
        self.in_use = 0

    def client(self, at: int) -> openai.AsyncOpenAI:
        """The client of address ``at``."""
        client = self._sdk.get(at)
        if client is None:
            client = self._sdk[at] = self._connections.sdk_client(at, self._http)
        return client

    async def close(self) -> None:
        """Close the pool."""
        await self._http.aclose()


class Connections:
    """Lanes as they are needed, the fullest first, so that a few requests use few connections again and again.

    Args:
        urls: The addresses.
        api_key: The key, or None to send none.
        settings: ``max_connections`` and ``extra_headers`` of the model.
    """

    def __init__(self, urls: tuple[str, ...], api_key: str | None, settings: ModelSettings) -> None:
        self._urls = urls
        self._api_key = api_key
        self._settings = settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loading: asyncio.Task[None] | None = None
        self._places = asyncio.Semaphore(settings.max_connections or MAX_CONNECTIONS)
        self._lanes: list[Lane] = []
        self._closed = False
        self._tls: Any = False
        self.library: Any = None
        """The HTTP library that the SDK uses: its exceptions come out of a stream as they are."""
        self.headers: dict[str, Any] = {}
        """What every request says to send no key, when there is none."""

    async def lease(self) -> Lane:
        """A lane with a free place; waits while ``max_connections`` are in use. Give it back.

        Raises:
            ProviderError: ``provider.closed``.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            # connections belong to a loop, and so does who waits for one
            self._loop = loop
            self._lanes = []
            self._places = asyncio.Semaphore(self._settings.max_connections or MAX_CONNECTIONS)
            if self.library is None:
                # importing the SDK takes most of a second, which must not hold up the loop
                self._loading = loop.create_task(asyncio.to_thread(self._load))
        if self._loading is not None and self.library is None:
            await asyncio.shield(self._loading)
        await self._places.acquire()
        if self._closed:
            self._places.release()
            raise ProviderError("the provider is closed", code="provider.closed", hint="build another one")
        lane = next((lane for lane in self._lanes if lane.in_use < LANE_CONNECTIONS), None)
        if lane is None:
            try:
                lane = Lane(self, self._pool(), self._places)
            except BaseException:
                self._places.release()  # a proxy in the environment that is none, say: the next one asks anew
                raise
            self._lanes.append(lane)
        lane.in_use += 1
        return lane

    def give_back(self, lane: Lane) -> None:
        """The request on this lane is over."""
        lane.in_use -= 1
        lane.places.release()

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        self._closed = True
        here = self._loop is asyncio.get_running_loop()
        if self._loading is not None and here:
            await asyncio.gather(self._loading, return_exceptions=True)
        lanes, self._lanes = self._lanes, []
        if here:
            for lane in lanes:
                await lane.close()

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        """What the library raises for an address, or a proxy in the environment, that it cannot use."""
        return () if self.library is None else (ValueError, ImportError, self.library.InvalidURL)

    def sdk_client(self, at: int, http: Any) -> openai.AsyncOpenAI:
        """An SDK client for one address on a pool."""
        import openai

        return openai.AsyncOpenAI(
            base_url=self._urls[at],
            api_key=self._api_key or "none",
            max_retries=0,
            timeout=self._timeout(),
            default_headers=self._settings.extra_headers,
            http_client=http,
        )

    def _load(self) -> None:
        import openai

        # the SDK has changed its HTTP library once: the one at hand is where its limits come from
        name = type(openai.DEFAULT_CONNECTION_LIMITS).__module__.partition(".")[0]
        library = import_module(name)
        # a line a request at INFO: with thousands of agents nobody wants it unasked
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.WARNING)
        if not self._here():
            self._tls = library.create_ssl_context()
        if self._api_key is None and not any(name.lower() == "authorization" for name in self._settings.extra_headers):
            self.headers = {"Authorization": openai.Omit()}
        self.library = library

    def _pool(self) -> Any:
        import openai

        here = self._here()
        return openai.DefaultAsyncHttpxClient(
            limits=self.library.Limits(max_connections=None, max_keepalive_connections=LANE_CONNECTIONS),
            timeout=self._timeout(),
            trust_env=not here,
            follow_redirects=not here,
            verify=self._tls,
        )

    def _here(self) -> bool:
        """Whether all servers are this machine's own: proxies, redirects and certificates are for those elsewhere."""
        return all(is_loopback(url) and url.startswith("http:") for url in self._urls)

    def _timeout(self) -> Any:
        return self.library.Timeout(None, connect=CONNECT_TIMEOUT_S)
