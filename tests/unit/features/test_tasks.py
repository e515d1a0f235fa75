"""Background tasks: how they end, that each end is told once, and what a later life of the agent makes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.agent.background import BackgroundTasks, TaskEnd
from kimi_ray.agent.slots import AgentAwake, AgentLeaving, StepStarting, TaskChanged
from kimi_ray.agent.task_fold import KEPT
from kimi_ray.errors import AgentError, ToolError
from kimi_ray.features.tasks import service
from kimi_ray.features.tasks.output import OutputRing, tail_of
from kimi_ray.features.tasks.tools import TaskList, TaskOutput, TaskStop, WaitFor
from kimi_ray.tools.contract import ToolOutput
from tests.unit.features.task_desk import Desk, Work


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncGenerator[Desk]:
    found = Desk(tmp_path)
    yield found
    await found.tasks.close()
    await found.environment.close()


async def call(desk: Desk, tool: Any, **arguments: Any) -> ToolOutput:
    made = tool(desk.tasks)
    return await made.run(made.check(arguments), desk.context)


async def test_an_end_is_in_the_log_and_told_once(desk: Desk) -> None:
    port: BackgroundTasks = desk.tasks
    work = Work()
    task_id = port.start("agent", "look around", work, agent_id="agent-3")
    assert task_id.startswith("agent-") and len(task_id) == len("agent-") + 8 and task_id != "agent-3"
    assert not desk.inbox
    work.go.set()
    ended = await desk.ended(task_id)
    assert ended == {
        "task_id": task_id, "status": "completed", "output_tail": "begun\nlast words", "output_bytes": 16
    }  # fmt: skip
    assert desk.inbox.wants_turn
    [text] = desk.say()
    head = f'id="{task_id}:completed" category="task" type="task.completed" source_kind="background_task"'
    assert text.splitlines() == [
        f'<notification {head} source_id="{task_id}" agent_id="agent-3">',
        "Title: Background agent completed",
        "Severity: info",
        f"look around ({task_id}) completed after 0.0 s",
        "<output>",
        "begun",
        "last words",
        "</output>",
        "</notification>",
    ]
    assert desk.say() == []
    assert desk.of("user/message")[0]["source"] == {
        "kind": "task", "task_id": task_id, "status": "completed", "notification_id": f"{task_id}:completed"
    }  # fmt: skip
    assert desk.tasks.get(task_id).told


async def test_failures_are_told_with_their_reason(desk: Desk) -> None:
    raising, saying = Work(), Work()
    raising.error = RuntimeError("no such planet")
    saying.end = TaskEnd("failed", reason="the child failed")
    one, two = desk.tasks.start("agent", "one", raising), desk.tasks.start("agent", "two", saying)
    raising.go.set()
    saying.go.set()
    assert "no such planet" in (await desk.ended(one))["reason"]
    assert (await desk.ended(two))["reason"] == "the child failed"
    assert all("Severity: warning" in text for text in desk.say())


async def test_a_cancelled_error_of_the_work_itself_is_a_failure_and_not_the_end_of_everything(desk: Desk) -> None:
    work = Work()
    work.error = asyncio.CancelledError()
    task_id = desk.tasks.start("agent", "odd", work)
    work.go.set()
    assert (await desk.ended(task_id))["status"] == "failed"


async def test_a_deadline_makes_it_timed_out(desk: Desk) -> None:
    work = Work()
    task_id = desk.tasks.start("agent", "slow", work, timeout_s=0.05)
    assert desk.of("task/started")[0]["timeout_s"] == 0.05
    ended = await desk.ended(task_id)
    assert ended["status"] == "timed_out" and "0.05 s" in ended["reason"] and work.cancelled.is_set()
    [text] = desk.say()
    assert 'type="task.timed_out"' in text and "Background agent timed out" in text


async def test_a_timeout_of_zero_is_kept_and_bounds_nothing(desk: Desk) -> None:
    work = Work()
    task_id = desk.tasks.start("agent", "long", work, timeout_s=0)
    assert desk.of("task/started")[0]["timeout_s"] == 0
    assert desk.tasks.get(task_id).timeout_s == 0
    assert desk.tasks._running[task_id].deadline is None
    work.go.set()
    assert (await desk.ended(task_id))["status"] == "completed"


async def test_a_place_that_is_kept_for_a_task_is_nobody_elses(tmp_path: Path) -> None:
    desk = Desk(tmp_path, limit=2)
    with desk.tasks.room():
        desk.tasks.start("agent", "x", Work())
        with pytest.raises(AgentError) as caught:
            desk.tasks.start("agent", "x", Work())
        assert caught.value.code == "task.limit_exceeded"
        with pytest.raises(AgentError), desk.tasks.room():
            pass
    with pytest.raises(ZeroDivisionError), desk.tasks.room():
        raise ZeroDivisionError  # what was prepared failed
    desk.tasks.start("agent", "x", Work())
    await desk.tasks.close()


async def test_too_many(tmp_path: Path) -> None:
    desk = Desk(tmp_path, limit=2)
    works = [Work(), Work()]
    first, _ = [desk.tasks.start("agent", "x", work) for work in works]
    with pytest.raises(AgentError) as caught:
        desk.tasks.start("agent", "x", Work())
    assert caught.value.code == "task.limit_exceeded" and caught.value.retryable
    assert len(desk.of("task/started")) == 2  # nothing was begun
    works[0].go.set()
    await desk.ended(first)
    third = desk.tasks.start("agent", "x", Work())
    await desk.tasks.close()
    assert {data["status"] for data in desk.of("task/ended")} == {"completed", "killed"}
    assert desk.tasks.get(third).status == "killed"
    with pytest.raises(AgentError) as caught:
        desk.tasks.start("agent", "x", Work())
    assert caught.value.code == "agent.closed"


async def test_stopping(desk: Desk) -> None:
    task_id = desk.tasks.start("agent", "x", Work())
    record = await desk.tasks.stop(task_id, "not needed")
    assert (record.status, record.reason) == ("killed", "not needed")
    [text] = desk.say()
    assert 'type="task.killed"' in text and "not needed" in text
    assert await desk.tasks.stop(task_id, "again") is record and record.reason == "not needed"
    with pytest.raises(ToolError) as caught:
        await desk.tasks.stop("bash-nothing")
    assert caught.value.code == "task.not_found" and task_id in str(caught.value.hint)


async def test_what_will_not_end_is_left_behind_after_its_time(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "FORCE_S", 0.05)
    work = Work()
    work.stubborn = asyncio.Event()
    task_id = desk.tasks.start("agent", "x", work)
    await asyncio.sleep(0)
    record = await desk.tasks.stop(task_id, "enough")
    assert record.status == "killed" and record.reason == "enough; it did not end by itself"
    assert len(desk.say()) == 1
    work.stubborn.set()
    await asyncio.sleep(0.01)
    assert len(desk.of("task/ended")) == 1 and not desk.inbox  # its own late end changes nothing


async def test_a_second_stop_does_not_cut_the_grace_short(desk: Desk) -> None:
    seen: list[str] = []
    tidy = asyncio.Event()

    async def work(write: Any) -> TaskEnd:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await tidy.wait()
            seen.append("tidied")
            raise
        raise AssertionError

    task_id = desk.tasks.start("agent", "x", work)
    await asyncio.sleep(0)
    stops = [asyncio.create_task(desk.tasks.stop(task_id, why)) for why in ("one", "two")]
    await asyncio.sleep(0.01)
    tidy.set()
    await asyncio.gather(*stops)
    assert seen == ["tidied"] and desk.tasks.get(task_id).reason == "one"


async def test_the_tools_tell_and_then_no_notice_follows(desk: Desk) -> None:
    work = Work()
    task_id = desk.tasks.start("agent", "look", work)
    shown = await call(desk, TaskOutput, task_id=task_id)
    assert "status: running" in str(shown.content)
    waiting = asyncio.create_task(call(desk, WaitFor, task_id=task_id, timeout=20))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    work.go.set()
    output = await waiting
    assert not output.is_error and output.meta == {"ended": [task_id]}
    assert "status: completed" in str(output.content) and "last words" in str(output.content)
    assert not desk.inbox and desk.of("task/reported") == [{"task_id": task_id, "by": "WaitFor"}]
    # asked again it is still there, and is not reported twice
    await call(desk, TaskOutput, task_id=task_id)
    assert len(desk.of("task/reported")) == 1
    assert desk.next_life(desk.environment.root and Path(desk.environment.root)).inbox.take() == []


async def test_a_notice_that_waits_is_withdrawn_when_a_tool_tells_first(desk: Desk) -> None:
    work = Work()
    task_id = desk.tasks.start("agent", "look", work)
    work.go.set()
    await desk.ended(task_id)
    assert desk.inbox.wants_turn
    await call(desk, TaskOutput, task_id=task_id)
    assert desk.say() == [] and not desk.inbox.wants_turn


async def test_a_wait_without_an_end_is_no_error(desk: Desk) -> None:
    assert (await call(desk, WaitFor, timeout=5)).content == "no background task is running"
    task_id = desk.tasks.start("agent", "look", Work())
    made = WaitFor(desk.tasks)
    output = await made.run({"timeout": 1, "task_id": task_id}, desk.context)
    assert not output.is_error and "nothing has ended within 1 s" in str(output.content)
    assert desk.tasks.get(task_id).status == "running"
    with pytest.raises(ToolError):
        made.check({"timeout": 601})
    output = await call(desk, WaitFor, timeout=5, task_id="bash-other")
    assert output.error_code == "task.not_found"


async def test_a_wait_for_any_ends_with_the_first(desk: Desk) -> None:
    works = [Work(), Work()]
    one, two = [desk.tasks.start("agent", "x", work) for work in works]
    waiting = asyncio.create_task(call(desk, WaitFor, timeout=20))
    await asyncio.sleep(0.01)
    works[1].go.set()
    assert (await waiting).meta == {"ended": [two]}
    works[0].go.set()
    await desk.ended(one)
    assert [note.key for note in desk.inbox.take()] == [one]


@pytest.mark.parametrize("by", ["event", "task"])
async def test_a_wait_that_nobody_hears_leaves_the_notice_to_come(desk: Desk, by: str) -> None:
    work = Work()
    task_id = desk.tasks.start("agent", "x", work)
    waiting = asyncio.create_task(call(desk, WaitFor, timeout=20, task_id=task_id))
    await asyncio.sleep(0.01)
    if by == "event":
        desk.context.cancelled.set()
        assert (await waiting).meta == {"ended": []}
    else:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    work.go.set()
    await desk.ended(task_id)
    assert len(desk.say()) == 1


async def test_a_stop_that_nobody_hears_leaves_the_notice_to_come(desk: Desk) -> None:
    tidy = asyncio.Event()

    async def work(write: Any) -> TaskEnd:
        try:
            return await asyncio.Event().wait()  # type: ignore[return-value]
        finally:
            await tidy.wait()

    task_id = desk.tasks.start("agent", "x", work)
    await asyncio.sleep(0)
    stopping = asyncio.create_task(call(desk, TaskStop, task_id=task_id))
    await asyncio.sleep(0.01)
    stopping.cancel()
    await asyncio.gather(stopping, return_exceptions=True)
    tidy.set()
    assert (await desk.ended(task_id))["status"] == "killed"
    assert len(desk.say()) == 1


async def test_the_stop_tool_answers_with_the_end(desk: Desk) -> None:
    task_id = desk.tasks.start("agent", "x", Work())
    await asyncio.sleep(0)
    output = await call(desk, TaskStop, task_id=task_id, reason="enough")
    assert "status: killed" in str(output.content) and "reason: enough" in str(output.content)
    assert desk.say() == [] and desk.of("task/reported") == [{"task_id": task_id, "by": "TaskStop"}]


async def test_a_stop_among_more_tasks_than_are_remembered_answers_with_the_end(tmp_path: Path) -> None:
    desk = Desk(tmp_path, limit=300)
    ids = [desk.tasks.start("agent", "x", Work()) for _ in range(210)]
    await asyncio.sleep(0)
    for output in await asyncio.gather(*(call(desk, TaskStop, task_id=ids[place]) for place in (5, 5, 7))):
        assert "status: killed" in str(output.content) and "begun" in str(output.content)
    output = await call(desk, WaitFor, timeout=1)
    assert output.content and not output.is_error
    await desk.tasks.close()
    await desk.environment.close()


async def test_lists(desk: Desk) -> None:
    assert (await call(desk, TaskList)).content == "no background task is running"
    works = [Work() for _ in range(3)]
    ids = [desk.tasks.start("agent", f"n{number}", work) for number, work in enumerate(works)]
    works[0].go.set()
    await desk.ended(ids[0])
    output = await call(desk, TaskList)
    assert output.meta == {"tasks": [ids[2], ids[1]]}
    output = await call(desk, TaskList, active_only=False, limit=2)
    assert output.meta == {"tasks": [ids[2], ids[1]]} and str(output.content).startswith("3 background tasks known")
    assert (await call(desk, TaskList, active_only=False)).meta == {"tasks": ids[::-1]}
    assert desk.inbox.wants_turn  # a list is no answer to one task: its notice still comes


# -- lives of the agent ----------------------------------------------------------------------------------------------


async def test_what_ran_when_the_host_was_lost_is_lost_and_told_once(desk: Desk, tmp_path: Path) -> None:
    task_id = desk.tasks.start("process", "server", Work(), timeout_s=0)
    second = desk.next_life(tmp_path)
    assert second.inbox and not second.inbox.wants_turn  # a revival alone asks no model
    await second.slots.awake.run(AgentAwake("resume"))
    assert second.of("task/lost") == [{"task_id": task_id}] and second.tasks.get(task_id).status == "lost"
    [text] = second.say()
    assert f'id="{task_id}:lost"' in text and 'type="task.lost"' in text and "did not survive" in text
    third = second.next_life(tmp_path)
    await third.slots.awake.run(AgentAwake("resume"))
    assert not third.inbox and len(third.of("task/lost")) == 1 and not third.slots.step
    assert third.tasks.get(task_id).timeout_s == 0


async def test_a_life_lost_between_the_end_and_its_notice_tells_it(desk: Desk, tmp_path: Path) -> None:
    work = Work()
    task_id = desk.tasks.start("agent", "x", work)
    work.go.set()
    await desk.ended(task_id)
    second = desk.next_life(tmp_path)
    [text] = second.say()
    assert 'type="task.completed"' in text and "last words" in text
    assert desk.next_life(tmp_path).inbox and not second.next_life(tmp_path).inbox


async def test_tools_of_a_life_that_was_not_told_to_wake_know_of_the_loss(desk: Desk, tmp_path: Path) -> None:
    task_id = desk.tasks.start("process", "x", Work())
    second = desk.next_life(tmp_path)
    assert (await call(second, TaskList)).content == "no background task is running"
    assert second.tasks.get(task_id).status == "lost"
    third = desk.next_life(tmp_path)
    await third.slots.step.run(StepStarting(0, 0))
    assert third.tasks.get(task_id).status == "lost" and not third.slots.step and not third.slots.awake


async def test_closing_stops_all_and_the_next_life_tells_it(desk: Desk, tmp_path: Path) -> None:
    task_id = desk.tasks.start("agent", "x", Work())
    await asyncio.sleep(0)
    await desk.tasks.close()
    ended = await desk.ended(task_id)
    assert (ended["status"], ended["reason"]) == ("killed", "the agent was closed")
    assert not desk.inbox  # nobody is there to hear it
    second = desk.next_life(tmp_path)
    assert second.of("task/lost") == [] and len(second.say()) == 1


async def test_a_log_that_is_taken_away_does_not_keep_tasks_alive(desk: Desk) -> None:
    work = Work()
    task_id = desk.tasks.start("agent", "x", work)
    await asyncio.sleep(0)
    desk.log.detach()
    await desk.tasks.close()
    assert work.cancelled.is_set() and desk.of("task/ended") == []
    assert task_id not in desk.tasks._running


@pytest.mark.parametrize("whose", [{"run_id": "run_1"}, {"origin": "subagent"}])
async def test_a_rollout_and_a_subagent_are_not_woken(tmp_path: Path, whose: dict[str, Any]) -> None:
    desk = Desk(tmp_path, **whose)
    work = Work()
    task_id = desk.tasks.start("agent", "x", work)
    work.go.set()
    await desk.ended(task_id)
    assert desk.inbox and not desk.inbox.wants_turn
    await desk.tasks.close()


async def test_others_are_told(desk: Desk) -> None:
    heard: list[TaskChanged] = []

    async def hear(changed: TaskChanged) -> None:
        heard.append(changed)
        raise RuntimeError("deaf")

    desk.slots.task.register("test", hear)
    work = Work()
    task_id = desk.tasks.start("agent", "x", work)
    work.go.set()
    await desk.ended(task_id)
    await desk.tasks._notices.settled()
    assert [(changed.task_id, changed.status) for changed in heard] == [(task_id, "running"), (task_id, "completed")]


async def test_memory_is_bounded(desk: Desk) -> None:
    for _ in range(KEPT + 20):
        work = Work()
        work.go.set()
        task_id = desk.tasks.start("agent", "x", work)
        while task_id in desk.tasks._running:
            await asyncio.sleep(0)
        desk.say()
    assert len(desk.journal.fold.tasks) <= KEPT + 1
    assert len(desk.tasks._kept) <= 16
    assert desk.tasks.output(desk.tasks.get(task_id), 100) == "begun\nlast words"


# -- output ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_ring_keeps_the_end(size: int) -> None:
    ring, whole = OutputRing(1000), ""
    for number in range(500):
        part = (f"{number:04}é" * size)[: size + number % 3]
        whole += part
        ring.write(part)
    data = whole.encode()
    assert ring.total == len(data)
    for limit in (1, 2, 10, 999, 1000, 5000):
        assert ring.tail(limit) == tail_of(data, min(limit, 1000))
    assert sum(map(len, ring._parts)) <= 1000 + max(1000, size * 6)


def test_a_torn_character_is_left_out() -> None:
    assert [tail_of("aé€😀".encode(), limit) for limit in range(11)] == [
        "", "", "", "", "😀", "😀", "😀", "€😀", "€😀", "é€😀", "aé€😀"
    ]  # fmt: skip


def test_a_million_tiny_writes_stay_small() -> None:
    ring = OutputRing(1 << 20)
    for _ in range(20_000):
        ring.write("x")
    assert len(ring._parts) <= 1 << 12 and ring.tail(5) == "xxxxx"


async def test_who_has_no_task_costs_nothing_at_its_end_and_who_has_leaves_before_others(desk: Desk) -> None:
    order: list[str] = []

    async def other(_event: AgentLeaving) -> None:
        order.append(desk.tasks.get(task_id).status)

    assert not desk.slots.leaving and not desk.slots.awake and not desk.slots.step
    desk.slots.leaving.register("other", other)
    task_id = desk.tasks.start("agent", "x", Work())
    assert desk.slots.leaving.handlers == ("tasks", "other")
    await desk.slots.leaving.run(AgentLeaving("closed"))
    assert order == ["killed"]
