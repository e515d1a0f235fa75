"""What a bench reports: one JSON object, the same keys for all, then each bench's own figures."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from kimi_ray.settings import Settings


class BenchReport(Settings):
    """One measured run. Ratios are what counts: machines differ and are noisy."""

    model_config = ConfigDict(frozen=True, extra="allow")

    bench: str
    value: float
    """What was reached, in ``unit``; more is better unless the unit is a time."""
    unit: str
    floor: float
    """The same work reduced to writing and syncing its bytes, in the same unit, in the same run."""
    ratio: float
    """``value`` over ``floor``."""
    wall_s: float
    cpu_s: float
    """CPU seconds of all processes."""
    peak_pss_mb: float
    """Largest sum of all processes' proportional memory, sampled every two seconds and at the end."""
    figures: dict[str, Any] = Field(default_factory=dict, exclude=True)

    def to_data(self) -> dict[str, Any]:
        """The report as it is printed: floats rounded to three digits, the bench's own figures last."""
        data = self.model_dump(mode="json")
        data |= self.figures
        return {key: round(value, 3) if isinstance(value, float) else value for key, value in data.items()}
