"""Any server that speaks Chat Completions: OpenAI's, vLLM, SGLang, llama.cpp, Kimi, DeepSeek and their like.

The SDK makes the connection, sends the request and knows the statuses; its own retries are off, because they would
hide attempts. The body and the answer's stream are made and read here: the SDK's models of them cost several times
as much per message and per token, and do not tell a finished stream from a cut one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic_core import from_json

from kimi_ray.errors import ProviderError
from kimi_ray.llm.chat import ChatRequest, Chunk, Finish, MetaChunk, UsageChunk
from kimi_ray.llm.completion import CompletionReader, finish_reason
from kimi_ray.llm.connections import CONNECT_TIMEOUT_S, Connections, Lane
from kimi_ray.llm.deadline import Deadline
from kimi_ray.llm.estimate import Estimator
from kimi_ray.llm.faults import (
    Place,
    TimeoutKind,
    address_fault,
    bad_stream_fault,
    connection_fault,
    status_fault,
    stream_error_fault,
    timeout_fault,
)
from kimi_ray.llm.models import ModelSettings
from kimi_ray.llm.sse import EventParser, EventTooLargeError
from kimi_ray.llm.surrogates import whole
from kimi_ray.llm.wire import chat_body
from kimi_ray.settings import Usage

if TYPE_CHECKING:
    import openai

_T = TypeVar("_T")

MAX_BODY_BYTES = 64 << 20
GOODBYE_S = 10.0
"""How long a server may take from the last word of an answer to the end of its stream."""
DRAIN_S = 0.2
_MAX_REMEMBERED_AGENTS = 65_536
_REQUEST_ID_HEADERS = ("x-request-id", "request-id", "x-trace-id")
_EXCERPT_BYTES = 2000


class OpenAIProvider:
    """Reaches one model server, or several that serve the same models.

    Args:
        base_urls: Addresses as they stand before ``/chat/completions``. With several, each new agent gets the next
            one and stays with it (its conversation is in that server's cache) until that server cannot be reached.
        api_key: The key, or None to send none.
        settings: Time-outs, reasoning, connections and the rest of ``[models.X]``.
        key_env: The variable that the key came from, for messages.
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        *,
        api_key: str | None = None,
        settings: ModelSettings | None = None,
        key_env: str = "",
    ) -> None:
        self._settings = settings or ModelSettings()
        self._urls = tuple(base_urls)
        self._api_key = api_key
        secrets = (api_key or "", *self._settings.extra_headers.values())
        self._secrets = tuple(secret for secret in secrets if secret)
        self._key_name = f"${key_env}" if key_env else "the key"
        self._estimator = Estimator()
        self._connections = Connections(self._urls, api_key, self._settings)
        self._url_of: dict[tuple[str, str], int] = {}
        self._turn = 0

    def __repr__(self) -> str:
        return f"OpenAIProvider({list(self._urls)!r}, api_key={'[redacted]' if self._api_key else None})"

    @property
    def name(self) -> str:
        """``openai``."""
        return "openai"

    async def stream(self, request: ChatRequest) -> AsyncIterator[Chunk]:
        """Ask, and yield the answer's chunks as they come. Leaving the iterator closes the connection at once.

        Raises:
            ProviderError: see ``kimi_ray.llm.faults``.
        """
        at = self._route(request)
        place = Place(request.model, self._urls[at], self._secrets, self._key_name)
        body = chat_body(request, self._settings, completion_tokens="api.openai.com" in self._urls[at])
        answer = _Answer(place, self._settings)
        lane = await answer.lane(self._connections)
        try:
            yield await answer.open(answer.client(lane, at), body)
            while (chunks := await answer.more()) is not None:
                for chunk in chunks:
                    yield chunk
            for chunk in answer.reader.end():
                yield chunk
            yield UsageChunk(answer.reader.usage or self._estimated(request, answer.reader))
            yield Finish(finish_reason(answer.reader.raw_finish), answer.reader.raw_finish)
            await answer.drain()
        except ProviderError as error:
            if error.details.get("kind") in ("connection", "connect"):
                self._move_on(request, at)
            raise
        finally:
            try:
                await answer.close()
            finally:
                self._connections.give_back(lane)

    def _estimated(self, request: ChatRequest, reader: CompletionReader) -> Usage:
        return self._estimator.usage(request, text_chars=reader.text_chars, reasoning_chars=reader.reasoning_chars)

    async def served_models(self, *, timeout_s: float = 30.0) -> list[str]:
        """The names of the models that the (first) server offers.

        Raises:
            ProviderError: see ``kimi_ray.llm.faults``.
        """
        return sorted(str(model["id"]) for model in await self.model_list(timeout_s=timeout_s))

    async def model_list(self, *, timeout_s: float = 30.0) -> list[dict[str, Any]]:
        """What the (first) server tells of its models, each with its ``id``.

        Raises:
            ProviderError: see ``kimi_ray.llm.faults``.
        """
        answer = _Answer(Place("", self._urls[0], self._secrets, self._key_name), self._settings)
        lane = await answer.lane(self._connections)
        try:
            return await answer.models(answer.client(lane, 0), timeout_s)
        finally:
            await answer.close()
            self._connections.give_back(lane)

    async def whole_answer(self, request: ChatRequest) -> dict[str, Any]:
        """The server's answer as it is, asked for without a stream: to see what this server says under which name.

        Raises:
            ProviderError: see ``kimi_ray.llm.faults``.
        """
        settings = self._settings.model_copy(update={"stream": False})
        answer = _Answer(Place(request.model, self._urls[0], self._secrets, self._key_name), settings)
        body = chat_body(request, settings, completion_tokens="api.openai.com" in self._urls[0])
        lane = await answer.lane(self._connections)
        try:
            await answer.open(answer.client(lane, 0), body)
            return await answer.whole()
        finally:
            try:
                await answer.close()
            finally:
                self._connections.give_back(lane)

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        await self._connections.close()

    def _route(self, request: ChatRequest) -> int:
        if len(self._urls) == 1:
            return 0
        agent = (request.session_id, request.agent_id)
        at = self._url_of.get(agent)
        if at is None:
            if len(self._url_of) >= _MAX_REMEMBERED_AGENTS:
                del self._url_of[next(iter(self._url_of))]
            at = self._url_of[agent] = self._turn % len(self._urls)
            self._turn += 1
        return at

    def _move_on(self, request: ChatRequest, at: int) -> None:
        if len(self._urls) > 1:
            self._url_of[request.session_id, request.agent_id] = (at + 1) % len(self._urls)


class _Answer:
    """One request and its answer: every wait bounded, every failure a ``ProviderError``."""

    def __init__(self, place: Place, settings: ModelSettings) -> None:
        self.reader = CompletionReader(settings.reasoning_field)
        self._place = place
        self._settings = settings
        self._began = time.monotonic()
        self._parser: EventParser | None = None
        self._begin = b""
        self._ended = False
        self._fault: ProviderError | None = None
        self._http: Any = None
        self._refusals: tuple[type[Exception], ...] = ()
        self._headers: dict[str, Any] = {}
        self._response: Any = None
        self._bytes: AsyncIterator[bytes] | None = None
        self._deadline = Deadline()

    async def lane(self, connections: Connections) -> Lane:
        """A place among the connections; waited for when ``max_connections`` are in use."""
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                lane = await connections.lease()
        except TimeoutError:
            raise timeout_fault(self._place, "total", self._settings.timeout_s) from None
        except connections.refusals as error:
            raise address_fault(self._place, error) from None
        self._http, self._headers, self._refusals = connections.library, connections.headers, connections.refusals
        return lane

    def client(self, lane: Lane, at: int) -> openai.AsyncOpenAI:
        """The client of address ``at``."""
        try:
            return lane.client(at)
        except self._refusals as error:
            raise address_fault(self._place, error) from None

    async def open(self, client: openai.AsyncOpenAI, body: dict[str, Any]) -> MetaChunk:
        """Send the request and wait for the headers."""
        streams = self._settings.stream
        # the body travels as `extra_body`, which the SDK sends as it is: its walk over `messages` takes 150 us each
        manager = client.chat.completions.with_streaming_response.create(
            model=body["model"],
            messages=[],
            stream=streams,
            extra_headers=self._headers,
            extra_body=({"stream_options": {"include_usage": True}} | body) if streams else body,
        )
        self._response = await self._wait(manager.__aenter__())
        headers = self._response.headers
        kind = headers.get("content-type", "")
        if "html" in kind:
            raise bad_stream_fault(self._place, f"{kind}, which no model server does", "", retryable=False)
        # what comes decides, not what was asked for: some servers do not stream, some know nothing else
        if "event-stream" in kind or (streams and "json" not in kind):
            self._parser = EventParser()
        self._bytes = self._response.iter_bytes()
        return MetaChunk(
            http_status=self._response.status_code,
            request_id=next((headers[name] for name in _REQUEST_ID_HEADERS if name in headers), None),
            connect_ms=round((time.monotonic() - self._began) * 1000),
        )

    async def more(self) -> list[Chunk] | None:
        """The chunks of what comes next, or None when the answer is complete."""
        if self._fault is not None:
            raise self._fault
        if self._ended:
            return None
        if self._parser is None:
            return await self._whole()
        try:
            data = await self._read()
            events = self._parser.feed(data) if data is not None else self._parser.end()
        except EventTooLargeError:
            raise bad_stream_fault(self._place, "an event above 16 MiB", "") from None
        except ProviderError:
            if not self.reader.finished:
                raise
            # the answer was complete; only the goodbye was lost
            self._ended = True
            return None
        if len(self._begin) < _EXCERPT_BYTES and data is not None:
            self._begin += data[:_EXCERPT_BYTES]
        chunks: list[Chunk] = []
        try:
            for event in events:
                if event.startswith(b"[DONE]"):
                    self._ended = True
                    return chunks
                chunks += self._understood(event)
            if data is None:
                self._ended = True
                if not self.reader.finished:
                    raise self._cut()
        except ProviderError as error:
            # what came before it in the same packet is the caller's
            self._fault = error
        return chunks

    def _cut(self) -> ProviderError:
        if not self.reader.answered and self._begin.strip() and b"data:" not in self._begin:
            said = self._begin.decode(errors="replace")
            return bad_stream_fault(self._place, "something that is not an event stream", said)
        return connection_fault(self._place, "it ended before the answer was finished", cut=True)

    async def _body(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        while (data := await self._read()) is not None:
            parts.append(data)
            size += len(data)
            if size > MAX_BODY_BYTES:
                raise bad_stream_fault(self._place, "an answer above 64 MiB", "")
        self._ended = True
        return b"".join(parts)

    async def _whole(self) -> list[Chunk]:
        body = await self._body()
        chunks = self._understood(body)
        if not self.reader.answered:
            raise bad_stream_fault(self._place, "an answer without choices", _excerpt(body))
        return chunks

    def _understood(self, data: bytes) -> list[Chunk]:
        """The chunks of one JSON object of the answer."""
        found = self._object(data)
        try:
            return self.reader.read(found)
        except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError):
            raise bad_stream_fault(self._place, "an object that is not a completion", _excerpt(data)) from None

    def _object(self, data: bytes) -> dict[str, Any]:
        value = _json(data)
        if not isinstance(value, dict):
            raise bad_stream_fault(self._place, "something that is not a JSON object", _excerpt(data))
        found = cast("dict[str, Any]", value)
        if found.get("error"):
            raise stream_error_fault(self._place, found["error"])
        if found.get("object") == "error":
            raise stream_error_fault(self._place, found)
        return found

    async def whole(self) -> dict[str, Any]:
        """The body of an answer that is no stream."""
        body = await self._body()
        self._understood(body)
        if not self.reader.answered:
            raise bad_stream_fault(self._place, "an answer without choices", _excerpt(body))
        return self._object(body)

    async def models(self, client: openai.AsyncOpenAI, timeout_s: float) -> list[dict[str, Any]]:
        """What stands at ``/models``: the entries that have an id."""
        listing = client.models.with_raw_response.list(timeout=timeout_s, extra_headers=self._headers)
        body = (await self._wait(listing)).content
        listed = self._object(body).get("data")
        if not isinstance(listed, list):
            raise bad_stream_fault(self._place, "something that is not a list of models", _excerpt(body))
        entries = [cast("dict[str, Any]", one) for one in cast("list[Any]", listed) if isinstance(one, dict)]
        return [{**one, "id": whole(one["id"])} for one in entries if isinstance(one.get("id"), str)]

    async def drain(self) -> None:
        """Read the rest of a complete answer's body, so that its connection can be used again."""
        if self._bytes is not None:
            with contextlib.suppress(TimeoutError, self._http.HTTPError):
                async with asyncio.timeout(DRAIN_S):
                    async for _ in self._bytes:
                        pass

    async def close(self) -> None:
        """Close the response; the connection of an unfinished one with it."""
        self._deadline.close()
        response, self._response = self._response, None
        if response is not None:
            await response.close()

    async def _read(self) -> bytes | None:
        return await self._wait(anext(cast("AsyncIterator[bytes]", self._bytes), None), reading=True)

    async def _wait(self, step: Awaitable[_T], *, reading: bool = False) -> _T:
        """One wait for the server, bounded, its failure translated."""
        import openai

        bound, kind = self._settings.timeout_s, cast("TimeoutKind", "total")
        left = self._began + bound - time.monotonic()
        idle = min(self._settings.idle_timeout_s, GOODBYE_S) if self.reader.finished else self._settings.idle_timeout_s
        if self._settings.stream and idle < left:
            left, bound, kind = idle, idle, "idle"
        try:
            with self._deadline.within(left):
                return await step
        except TimeoutError:
            raise timeout_fault(self._place, kind, bound) from None
        except openai.APIStatusError as error:
            response = error.response
            raise status_fault(self._place, response.status_code, response.text, response.headers) from None
        except openai.APITimeoutError:
            # the only time-out that the library is told is that of the connection
            raise timeout_fault(self._place, "connect", CONNECT_TIMEOUT_S) from None
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            if isinstance(cause, (self._http.InvalidURL, self._http.UnsupportedProtocol)):
                raise address_fault(self._place, cause) from None
            stale = isinstance(cause, self._http.RemoteProtocolError)
            raise connection_fault(self._place, _reason(cause), stale=stale) from None
        except self._http.InvalidURL as error:
            raise address_fault(self._place, error) from None
        except self._http.TransportError as error:
            raise connection_fault(self._place, _reason(error), cut=reading) from None
        except self._http.HTTPError as error:
            raise bad_stream_fault(self._place, f"a body that cannot be read ({_reason(error)})", "") from None


def _json(data: bytes) -> Any:
    try:
        return from_json(data)
    except ValueError:
        pass
    # half a surrogate pair is legal JSON, and the fast parser refuses it; broken UTF-8 is worth a U+FFFD
    text = data.decode(errors="replace")
    if "\\ud" not in text.lower() and "\ufffd" not in text:
        return None
    import json

    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _excerpt(data: bytes) -> str:
    return data[:_EXCERPT_BYTES].decode(errors="replace")


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
