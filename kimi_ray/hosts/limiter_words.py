"""What agent hosts and the registry tell each other about places at model servers. Travels between processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from kimi_ray.llm.limiter import Tally


@dataclass(frozen=True, slots=True)
class PlacesWanted:
    """One host's state for one model and key, and what happened there since it last told."""

    key: str
    """Of the model, its server and its key (``limiter_key``)."""
    model: str
    """The name that the user said, for the history."""
    max_places: int | None
    adaptive: bool
    portion: int
    """The places that the host believes to have."""
    in_use: int
    wanted: int
    """The most that were in use or waited for at once since the last report; 0 gives the portion back."""
    limit: int
    """The limit of the whole runtime as the host last heard it (0: never): a new registry goes on from it."""
    tally: Tally = field(default_factory=Tally)


@dataclass(frozen=True, slots=True)
class Portion:
    """A host's part of the places of one model and key, until it asks again."""

    key: str
    places: int
    limit: int
    cuts: int
    pause_s: float = 0.0
    """Nothing new for so many seconds from now."""
