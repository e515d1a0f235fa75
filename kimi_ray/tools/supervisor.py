"""One command under watch: it dies when its host does.

Run as a script (``python -S -E -I supervisor.py PROGRAM ARG...``), so it imports nothing of kimi_ray and little else.
Standard input is the life line: it ends when the host closes it, or when the kernel does because the host was killed.
Then, and when the command itself has ended, every process that the command started is killed: its group, and, where
the kernel has subreapers, also those that made a session of their own. The exit code is the command's, 128 + n after
signal n, 126 or 127 when it could not be started.

It is two processes: Ray kills the children of a worker that ends, so the one that the host started only stands for the
one that watches.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_MS = 500
"""How often the parent is looked at: a process forked by the host may hold the other end of the life line open."""
_KILL_S = 2.0
_DEAD_STATES = b"ZX"
TERMINATE = b"T"
"""Written into the life line: the command's group is asked to end (SIGTERM), and waited for as before."""


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def processes() -> dict[int, tuple[int, int]]:
    """The living processes as ``{pid: (parent, session)}``; empty where there is no ``/proc``."""
    found: dict[int, tuple[int, int]] = {}
    with suppress(OSError):
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            with suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                # the command name is in parentheses and may hold anything, also parentheses
                fields = file.read().rpartition(b")")[2].split()
                if fields[0] not in _DEAD_STATES:
                    found[int(name)] = (int(fields[1]), int(fields[3]))
    return found


def kill_session(session: int) -> None:
    """Kill what is left of a session whose supervisor is gone."""
    for pid, (_, of) in processes().items():
        if of == session:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _descendants(ancestor: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in processes().items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    stack = [ancestor]
    while stack:
        below = children.get(stack.pop(), [])
        found += below
        stack += below
    return found


def _kill_all(group: int | None) -> None:
    """Kill the group, if one is named, and all descendants, until there is no child left (orphans become ours)."""
    deadline = time.monotonic() + _KILL_S
    while True:
        if group is not None:
            with suppress(OSError):
                os.killpg(group, signal.SIGKILL)
        for pid in _descendants(os.getpid()):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if time.monotonic() > deadline:
            return
        time.sleep(0.005)


def _become(argv: list[str], parent: int) -> None:
    """In the child: a group of its own, an empty standard input, default signals, then the command."""
    os.setpgid(0, 0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(127)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for number in (signal.SIGPIPE, signal.SIGINT, getattr(signal, "SIGXFSZ", signal.SIGPIPE)):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except FileNotFoundError:
        os.write(2, f"{argv[0]}: command not found\n".encode(errors="replace"))
        os._exit(127)
    except OSError as error:
        os.write(2, f"{argv[0]}: cannot be run: {error.strerror}\n".encode(errors="replace"))
        os._exit(126)


def _note(_number: int, _frame: object) -> None:
    """A signal only has to have a handler to arrive at the wakeup descriptor."""


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


def _wait(child: int, host: int, stand_in: int) -> int | None:
    """The wait status of the command, or None when the life line was cut first."""
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, _note)
    poll.register(woken, select.POLLIN)
    while True:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    return ended[1]
        for ready, _ in poll.poll(_LOOK_MS):
            if ready == woken:
                os.read(woken, 512)
            elif not (said := os.read(0, 512)):
                return None
            elif TERMINATE in said:
                with suppress(OSError):
                    os.killpg(child, signal.SIGTERM)
        if os.getppid() != stand_in or _is_gone(host):
            return None


def _stand_in(watcher: int) -> int:
    """What the host sees: it ends as the watcher does, and ends what a watcher leaves that was killed."""
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # the output ends with the command
    os.dup2(1, 2)
    _, status = os.waitpid(watcher, 0)
    if os.WIFSIGNALED(status):
        _kill_all(None)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def main(argv: list[str]) -> int:
    """Run ``argv`` to its end or to the host's, and leave nothing of it behind."""
    host, stand_in = os.getppid(), os.getpid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    watcher = os.fork()
    if watcher:
        return _stand_in(watcher)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    me = os.getpid()
    child = os.fork()
    if child == 0:
        _become(argv, me)
    with suppress(OSError):
        os.setpgid(child, child)  # in both, so that neither has to win the race
    # what it prints belongs to the command: holding its output open here would hide the end of it
    status = _wait(child, host, stand_in)
    _kill_all(child)
    if status is None:
        return 128 + signal.SIGKILL
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
