"""The guard of an agent's window: looks before each request, and when one was refused as too long (DSH 9.6).

What it cannot do harms no turn: the request goes out as it is, and the log says why nothing was compacted.
"""

from __future__ import annotations

from kimi_ray.agent.journal import Journal
from kimi_ray.agent.model_in_use import ModelInUse
from kimi_ray.agent.slots import AgentSlots, RequestFailed, StepStarting
from kimi_ray.errors import KimiRayError
from kimi_ray.features.compaction.engine import CompactionEngine

NAME = "compaction"


class WindowGuard:
    """Handlers in the slots ``step`` and ``request_failed`` of one agent.

    A model whose window is not known costs nothing: then only a refused request tells that it is full, and from then on
    it is known (``ContextWindow``).

    Args:
        engine: What compacts.
        journal: The agent's log.
        in_use: The agent's model.
        slots: Where it is asked.
    """

    def __init__(self, engine: CompactionEngine, journal: Journal, in_use: ModelInUse, slots: AgentSlots) -> None:
        self._engine = engine
        self._journal = journal
        self._in_use = in_use
        self._slots = slots
        self._overflows = 0
        self._overflowed: tuple[int, int | None] | None = None
        self._noted: set[str] = set()
        self._listen()
        in_use.on_switch(self._listen)

    def _listen(self) -> None:
        settings = self._in_use.model.settings
        if not settings.compaction.auto:
            self._slots.step.remove(NAME)
            self._slots.request_failed.remove(NAME)
            return
        self._slots.request_failed.register(NAME, self._request_failed)
        if self._engine.threshold is None:
            self._slots.step.remove(NAME)
        else:
            self._slots.step.register(NAME, self._before_request)

    async def _before_request(self, _event: StepStarting) -> None:
        try:
            await self._engine.relieve()
        except KimiRayError as error:
            self._tell(error)

    async def _request_failed(self, event: RequestFailed) -> None:
        if event.error.code != "context.overflow" or not self._may_mend(event.turn):
            return
        surface = self._journal.log.surface
        before = surface.generation
        try:
            await self._engine.after_overflow()
        except KimiRayError as error:
            self._tell(error)
        finally:
            self._listen()  # there may be a window now, also when the user stopped what was mending it
        if surface.generation != before:
            self._overflows += 1
            event.again()

    def _may_mend(self, turn: int) -> bool:
        """Whether requests were not yet mended too often in a row: in this turn, without an answer between them."""
        now = (turn, self._journal.fold.last_message_seq)
        if self._overflowed != now:
            self._overflowed, self._overflows = now, 0
        return self._overflows < self._engine.settings.overflow_retries

    def _tell(self, error: KimiRayError) -> None:
        """Say it in the log, where no ``compaction/end`` has said it, once for each kind.

        Raises:
            StoreError: ``store.fenced``.
        """
        if error.code == "store.fenced":
            raise error
        if "compaction_id" in error.details and error.code != "compaction.busy":
            return
        if error.code not in self._noted:
            self._noted.add(error.code)
            text = f"the context could not be shortened: {error.message} ({error.code})"
            self._journal.append("note/added", {"text": text, "by": "kimi-ray"})
