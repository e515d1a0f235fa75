"""The refusals that say that something of a session is not there."""

from __future__ import annotations

from kimi_ray.errors import AgentError, SessionError
from kimi_ray.store.seam import Stream


def no_session(session_id: str, *, home: str | None = None) -> SessionError:
    """``session.not_found``; ``home`` is named where it may be another one than the caller thinks."""
    where, whose = ("", "this home") if home is None else (f" in {home}", "a home")
    return SessionError(
        f"there is no session {session_id!r}{where}",
        code="session.not_found",
        hint=f"kimi-ray sessions list shows those of {whose}",
        details={"session_id": session_id} | ({} if home is None else {"home": home}),
    )


def no_agent(stream: Stream) -> AgentError:
    """``agent.not_found``."""
    return AgentError(
        f"session {stream.session_id} has no agent {stream.agent_id}",
        code="agent.not_found",
        hint="session.agents() lists them, and so does kimi-ray sessions show",
        details={"session_id": stream.session_id, "agent_id": stream.agent_id},
    )


def not_live(session_id: str, host: str) -> SessionError:
    """``session.not_live``: the host that was asked does not hold the session, or lets go of it just now."""
    return SessionError(
        f"session {session_id} is not live on {host}",
        code="session.not_live",
        hint="resume it",
        details={"session_id": session_id},
        retryable=True,
    )
