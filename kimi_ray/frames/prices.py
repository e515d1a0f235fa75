"""What requests cost: by the prices that a run was started with, else by those that are configured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

from pydantic import ValidationError

from kimi_ray.config import RuntimeConfig, load_models
from kimi_ray.llm.models import ModelSettings, Price, cost_usd
from kimi_ray.settings import Usage


@dataclass(frozen=True, slots=True)
class Priced:
    """The price of a model. ``wire`` is its name in requests: one that was asked under another name is another
    model; None is not known. ``date`` is the day on which the price counted."""

    price: Price
    wire: str | None
    date: str | None


class Prices:
    """Prices by the configured names of models.

    Args:
        models: What is known.
    """

    def __init__(self, models: Mapping[str, Priced] | None = None) -> None:
        self._models = dict(models or {})

    def over(self, other: Prices) -> Prices:
        """These, and for models that have none here those of ``other``."""
        return Prices({**other._models, **self._models})

    def cost(self, usage: Mapping[str, Any] | None, name: str | None, wire: str | None) -> float | None:
        """US dollars; None where the tokens or the price are not known.

        Args:
            usage: As an event has it.
            name: The model by its configured name.
            wire: Its name in the request.
        """
        found = self._found(name, wire)
        if not usage or found is None:
            return None
        known = {field: usage[field] for field in Usage.model_fields if field in usage}
        return cost_usd(Usage.model_construct(**known), found.price)

    def date(self, name: str | None, wire: str | None) -> str | None:
        """The day of a model's price; None where it has none."""
        found = self._found(name, wire)
        return None if found is None else found.date

    def _found(self, name: str | None, wire: str | None) -> Priced | None:
        found = self._models.get(name) if name is not None else None
        return None if found is None or (found.wire and wire and found.wire != wire) else found


NO_PRICES = Prices()


def configured_prices(config: RuntimeConfig) -> Prices:
    """The prices of the ``[models.X]`` tables, as of today.

    Raises:
        ConfigError: ``config.invalid``.
    """
    models, today = load_models(config), datetime.now(UTC).date().isoformat()
    found: dict[str, Priced] = {}
    for name, settings in models.items():
        inner = models.get(settings.inner) if settings.inner is not None else None
        price = settings.price or (inner.price if inner is not None else None)
        if price is not None:
            found[name] = Priced(price, _wire(name, settings), today)
    return Prices(found)


def prices_of_run(manifest: Mapping[str, Any]) -> Prices:
    """The prices that a run was started with, as its ``run.json`` has them; what is none there is passed over."""
    told: Any = manifest.get("prices")
    created = str(manifest.get("created_at") or "")[:10] or None
    found: dict[str, Priced] = {}
    for name, price in (cast("dict[str, Any]", told) if isinstance(told, dict) else {}).items():
        try:
            found[name] = Priced(Price.model_validate(price), None, created)
        except ValidationError:
            continue
    return Prices(found)


def _wire(name: str, settings: ModelSettings) -> str | None:
    return settings.model or name if settings.provider == "openai" else settings.model
