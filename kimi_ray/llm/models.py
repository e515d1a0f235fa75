"""Which model a name means, how it is reached, and what it costs."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_core import to_json

from kimi_ray.errors import ConfigError
from kimi_ray.llm.chaos import BAD_DAY, ChaosProvider, ChaosSettings
from kimi_ray.llm.context_window import CompactionSettings
from kimi_ray.llm.retry import RetryPolicy
from kimi_ray.settings import Settings, Usage

if TYPE_CHECKING:
    from kimi_ray.llm.chat import ChatProvider

DEFAULT_KEY_ENV = "OPENAI_API_KEY"
BASE_URL_ENV = "OPENAI_BASE_URL"
OPENAI_BASE_URL = "https://api.openai.com/v1"
SCRIPTED = "scripted"
RECORDED = "recorded"
CHAOS = "chaos"
DEFAULT_SCRIPT = "kimi_ray.llm.scripts:reviewer"


class Price(Settings):
    """US dollars per million tokens."""

    input: float = Field(default=0.0, ge=0)
    cached_input: float | None = Field(default=None, ge=0)
    """Input tokens read from a cache; None costs what ``input`` costs."""
    output: float = Field(default=0.0, ge=0)


class ModelSettings(Settings):
    """A ``[models.X]`` table: how to reach model X."""

    provider: Literal["openai", "scripted", "recorded", "chaos"] = "openai"
    """``openai`` is any server that speaks Chat Completions; ``scripted`` plays ``script``, ``recorded`` the answers in
    ``recording``; ``chaos`` spoils the answers of ``inner``."""
    model: str | None = None
    """The name on the wire; None is the table's own name."""
    base_url: str | tuple[str, ...] | None = None
    """One address or several (each agent stays with one while it answers); None takes ``OPENAI_BASE_URL``."""
    api_key_env: str | None = None
    """The variable that holds the key; None is ``OPENAI_API_KEY``, an empty text says that no key is needed."""
    max_context_tokens: int | None = Field(default=None, ge=1)
    """The model's window: what a request and its answer may have together."""
    compaction: CompactionSettings = Field(default_factory=CompactionSettings)
    """When and how the conversation is shortened (``docs/context.md``)."""
    max_connections: int | None = Field(default=None, ge=1)
    """Requests under way at once, over the whole runtime; None is as many as the server bears."""
    adaptive_connections: bool = True
    """Find out how many requests at once the server bears, at most ``max_connections``; False has ``max_connections``
    under way whatever the server says."""
    stream: bool = True
    timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds for one attempt in all."""
    idle_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds without a byte from the server, before the first and between any two. Streams only."""
    max_attempts: int = Field(default=10, ge=1)
    """Attempts a step, the first included."""
    retry_base_s: float = Field(default=0.5, ge=0)
    """Seconds between the first two attempts, doubled by each further one."""
    retry_max_s: float = Field(default=32.0, ge=0)
    """The longest of these waits, seconds."""
    retry_after_cap_s: float = Field(default=120.0, ge=0)
    """A server that asks to wait longer than so many seconds is given up on."""
    reasoning_field: str = Field(default="reasoning_content", min_length=1)
    """Under which name reasoning is sent back; it is read under this one, ``reasoning`` and ``reasoning_content``."""
    reasoning_history: Literal["none", "tool_calls", "all"] = "tool_calls"
    """Which earlier answers are sent back with their reasoning: none, those with tool calls (thinking models that use
    tools demand it), or all."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further keys of every request's body."""
    extra_headers: dict[str, str] = Field(default_factory=dict, repr=False)
    """Further headers of every request; their values are treated as secrets."""
    price: Price | None = None
    record_chunks: Literal["all", "coalesced", "none"] = "coalesced"
    """Which parts of a stream become events: every delta, deltas joined, or only the whole answer."""
    script: str | tuple[str | dict[str, Any], ...] | None = None
    """``scripted``: ``package.module:function``, or steps; None is the built-in reviewer."""
    latency_s: float = Field(default=0.0, ge=0)
    """``scripted``: seconds before the first chunk."""
    chunk_chars: int | None = Field(default=None, ge=1)
    """``scripted``: characters a chunk; None sends a block whole."""
    tokens_per_s: float | None = Field(default=None, gt=0)
    """``scripted``: pace of the chunks; None is as fast as possible."""
    on_end: Literal["error", "repeat", "cycle"] = "error"
    """``scripted``: what a list of steps does when it is used up."""
    recording: str | None = None
    """``recorded``: a file of answers (``kimi-ray replay SESSION --answers FILE``), on every node with agents."""
    inner: str | None = None
    """``chaos``: the model whose answers are spoiled; None is ``scripted``. What this table does not say is as in its
    table."""
    chaos: ChaosSettings | None = None
    """``chaos``: the faults; None is 10 % of 429, 5 % each of 5xx, cut streams and broken arguments."""

    @field_validator("base_url")
    @classmethod
    def _one_at_least(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        for url in (value,) if isinstance(value, str) else value or ():
            if not _is_address(url):
                raise ValueError(f"{url!r} is not an http or https address")
        return value or None

    @model_validator(mode="after")
    def _keeps_less_than_the_threshold(self) -> Self:
        window, compaction = self.max_context_tokens, self.compaction
        if window is not None and compaction.retained(window) >= max(1, compaction.threshold(window)):
            raise ValueError(
                f"compaction: the {compaction.retained(window)} tokens that are to stay are no less than the threshold"
                f" of {compaction.threshold(window)}"
            )
        return self

    def said(self) -> dict[str, Any]:
        """What differs from the defaults, as JSON, the values of ``extra_headers`` hidden."""
        data = self.model_dump(mode="json", exclude_defaults=True)
        if "extra_headers" in data:
            data["extra_headers"] = dict.fromkeys(data["extra_headers"], "**********")
        return data


class ResolvedModel(Settings):
    """A model ready to be reached: plain data that travels to hosts, the secret within, out of every dump and repr."""

    name: str
    """The name that the user said."""
    provider: str
    inner_provider: str | None = None
    """Of a ``chaos`` model: what it spoils."""
    model: str
    """The name on the wire."""
    base_urls: tuple[str, ...] = ()
    key_env: str = ""
    """Where the key was looked for, for messages."""
    settings: ModelSettings = Field(default_factory=ModelSettings)
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)

    @property
    def retry(self) -> RetryPolicy:
        """When a step asks this model again."""
        settings = self.settings
        return RetryPolicy(
            max_attempts=settings.max_attempts,
            base_ms=round(settings.retry_base_s * 1000),
            max_ms=round(settings.retry_max_s * 1000),
            retry_after_cap_ms=round(settings.retry_after_cap_s * 1000),
        )

    def cache_key(self) -> str:
        """Equal for models that one provider object can serve (a hash; the secret cannot be read from it)."""
        digest = hashlib.sha256(to_json(self.model_dump(mode="json", exclude={"name", "model"})))
        digest.update(to_json(self.settings.extra_headers))
        digest.update(self.api_key.get_secret_value().encode() if self.api_key is not None else b"")
        return digest.hexdigest()

    def limiter_key(self) -> str | None:
        """Equal for models whose requests are counted together; None for one whose requests nobody counts.

        Counted are the requests to a server, by address, name on the wire and key, and those of any model with
        ``max_connections``. Tables that differ in that have counts of their own.
        """
        bound, adapts = self.settings.max_connections, self.settings.adaptive_connections
        if bound is None and not (adapts and self.base_urls):
            return None
        secret = "" if self.api_key is None else self.api_key.get_secret_value()
        where = self.base_urls or (self.name,)
        return hashlib.sha256(to_json([where, self.model, secret, bound, adapts])).hexdigest()[:16]


def resolve_model(
    name: str | None, models: Mapping[str, ModelSettings], base_url: str | None, environ: Mapping[str, str]
) -> ResolvedModel:
    """What a model's name means here.

    1. A ``[models.X]`` table of that name; ``base_url``, when given, replaces the table's.
    2. ``scripted``, ``scripted:package.module:function`` and ``recorded:FILE``, which need no table.
    3. ``chaos`` and ``chaos:NAME``: the model NAME (``scripted``) on a bad day.
    4. With ``base_url`` or ``OPENAI_BASE_URL``: the name on the wire of that server.

    Args:
        name: The name; None means the only table, or the one called ``default``.
        models: The tables.
        base_url: An address said for this call.
        environ: Where ``OPENAI_BASE_URL`` and the key are looked up: the driver's environment.

    Raises:
        ConfigError: ``model.not_configured``; ``model.no_api_key`` naming the variable; ``model.bad_base_url``.
    """
    if name is None:
        name = "default" if "default" in models else next(iter(models)) if len(models) == 1 else None
    if not name:
        raise ConfigError(
            "no model is named" + (f"; configured are {', '.join(sorted(models))}" if models else ""),
            code="model.not_configured",
            hint=_both_forms("X"),
            details={"configured": sorted(models)},
        )
    settings = models.get(name)
    if settings is None and (name == SCRIPTED or name.startswith(f"{SCRIPTED}:")):
        settings = ModelSettings(provider="scripted", script=name.partition(":")[2] or None)
    if settings is None and name.startswith(f"{RECORDED}:"):
        settings = ModelSettings(provider="recorded", recording=name.partition(":")[2])
    if settings is None and (name == CHAOS or name.startswith(f"{CHAOS}:")):
        settings = ModelSettings(provider="chaos", inner=name.partition(":")[2] or None)
    if settings is not None and settings.provider == "chaos":
        return _spoiled(name, settings, models, base_url, environ)
    if settings is not None and settings.provider in (SCRIPTED, RECORDED):
        return ResolvedModel(name=name, provider=settings.provider, model=settings.model or name, settings=settings)
    urls = _addresses(settings, base_url, environ)
    if not urls:
        raise ConfigError(
            f"the model {name!r} is not configured, and there is no base URL to look for it"
            + (f"; configured are {', '.join(sorted(models))}" if models else ""),
            code="model.not_configured",
            hint=_both_forms(name),
            details={"model": name, "configured": sorted(models)},
        )
    settings = settings or ModelSettings()
    key_env = DEFAULT_KEY_ENV if settings.api_key_env is None else settings.api_key_env
    key = environ.get(key_env, "").strip() if key_env else ""
    if not key and key_env and not all(is_loopback(url) for url in urls):
        raise ConfigError(
            f"the model {name!r} needs a key, and the variable {key_env} is not set",
            code="model.no_api_key",
            hint=f'set {key_env}, name another variable with api_key_env in [models.{name}], or say api_key_env = ""'
            " when the server wants none",
            details={"model": name, "variable": key_env},
        )
    return ResolvedModel(
        name=name,
        provider="openai",
        model=settings.model or name,
        base_urls=urls,
        key_env=key_env,
        settings=settings,
        api_key=SecretStr(key) if key else None,
    )


def build_provider(resolved: ResolvedModel) -> ChatProvider:
    """A provider for the model; its library is imported here. Whoever builds it closes it.

    Raises:
        ConfigError: ``config.invalid_script``, ``config.invalid_recording``.
    """
    settings = resolved.settings
    if resolved.provider == "chaos":
        inner = resolved.model_copy(update={"provider": resolved.inner_provider, "inner_provider": None})
        return ChaosProvider(build_provider(inner), settings.chaos or BAD_DAY)
    if resolved.provider == "scripted":
        from kimi_ray.llm.scripted import ScriptedProvider

        return ScriptedProvider(
            settings.script if settings.script is not None else DEFAULT_SCRIPT,
            latency_s=settings.latency_s,
            chunk_chars=settings.chunk_chars,
            tokens_per_s=settings.tokens_per_s,
            on_end=settings.on_end,
        )
    if resolved.provider == "recorded":
        from kimi_ray.llm.recorded import RecordedProvider, load_answers

        return RecordedProvider(load_answers(settings.recording or ""))
    from kimi_ray.llm.openai import OpenAIProvider

    return OpenAIProvider(
        resolved.base_urls,
        api_key=resolved.api_key.get_secret_value() if resolved.api_key is not None else None,
        settings=settings,
        key_env=resolved.key_env,
    )


def cost_usd(usage: Usage, price: Price) -> float:
    """What the tokens cost, in US dollars; tokens written to a cache cost what input costs."""
    cached = price.input if price.cached_input is None else price.cached_input
    fresh = usage.input + usage.cache_write
    return (fresh * price.input + usage.cached * cached + usage.output * price.output) / 1_000_000


def is_loopback(url: str) -> bool:
    """Whether an address is this machine's own."""
    host = urlsplit(url).hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _spoiled(
    name: str,
    settings: ModelSettings,
    models: Mapping[str, ModelSettings],
    base_url: str | None,
    environ: Mapping[str, str],
) -> ResolvedModel:
    inner_name = settings.inner or SCRIPTED
    table = models.get(inner_name)
    if inner_name.partition(":")[0] == CHAOS or (table is not None and table.provider == "chaos"):
        raise ConfigError(
            f"the model {name!r} spoils the answers of {inner_name!r}, which is a chaos model itself",
            code="config.invalid",
            hint=f"name the model that answers as inner in [models.{name}]",
            details={"model": name, "inner": inner_name},
        )
    inner = resolve_model(inner_name, models, base_url, environ)
    said = {key: getattr(settings, key) for key in settings.model_fields_set}
    return inner.model_copy(
        update={
            "name": name,
            "provider": CHAOS,
            "inner_provider": inner.provider,
            "model": settings.model or inner.model,
            "settings": inner.settings.model_copy(update=said),
        }
    )


def _addresses(settings: ModelSettings | None, base_url: str | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    said = base_url or (settings.base_url if settings is not None else None) or environ.get(BASE_URL_ENV, "").strip()
    if not said:
        return (OPENAI_BASE_URL,) if settings is not None else ()
    urls = (said,) if isinstance(said, str) else said
    for url in urls:
        if not _is_address(url):
            raise ConfigError(
                f"the base URL {url!r} is not an http or https address",
                code="model.bad_base_url",
                hint="write it like http://127.0.0.1:8000/v1",
                details={"base_url": url},
            )
    return urls


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets without an end, a port that is no number
        return False


def _both_forms(name: str) -> str:
    return (
        f'write a [models.{name}] table with base_url = "http://host:8000/v1" into config.toml,'
        f" or say --model {name} --base-url http://host:8000/v1 (or set {BASE_URL_ENV});"
        " --model scripted needs neither"
    )
