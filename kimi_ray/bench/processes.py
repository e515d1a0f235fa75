"""What a run costs, over this process and all below it: CPU seconds and proportional memory (PSS), from /proc."""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Self

SAMPLE_S = 2.0
_TICKS = os.sysconf("SC_CLK_TCK")


def process_tree(root: int | None = None) -> list[int]:
    """The pid ``root`` (this process) and all its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            fields = _stat(int(entry))
            if fields is not None:
                children.setdefault(int(fields[1]), []).append(int(entry))
    found: list[int] = []
    waiting = [root or os.getpid()]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting.extend(children.get(pid, ()))
    return found


def cpu_s(pids: list[int]) -> float:
    """CPU seconds, user and system, that these processes have used so far (those that ended meanwhile: 0)."""
    total = 0
    for pid in pids:
        fields = _stat(pid)
        if fields is not None:
            total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def pss_mb(pids: list[int]) -> float:
    """Memory of these processes in MB, shared pages counted once (PSS)."""
    total_kb = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                for line in file:
                    if line.startswith("Pss:"):
                        total_kb += int(line.split()[1])
                        break
        except OSError:
            continue
    return total_kb / 1024


def rss_mb(pid: int | None = None) -> float:
    """Memory of one process (this one) now, in MB."""
    return _status_mb(pid, "VmRSS:")


def peak_rss_mb(pid: int | None = None) -> float:
    """The most memory that one process (this one) had since it began, or since ``reset_peak``, in MB."""
    return _status_mb(pid, "VmHWM:")


def reset_peak(pid: int | None = None) -> None:
    """Forget the peak of a process: what ``peak_rss_mb`` tells counts from now on."""
    with open(f"/proc/{pid or os.getpid()}/clear_refs", "w") as file:
        file.write("5")


def _status_mb(pid: int | None, key: str) -> float:
    with open(f"/proc/{pid or os.getpid()}/status") as file:
        return next((int(line.split()[1]) for line in file if line.startswith(key)), 0) / 1024


def _stat(pid: int) -> list[str] | None:
    """The fields of ``/proc/<pid>/stat`` from the state on (the name before it may hold anything)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def role(pid: int) -> str:
    """What a process is, from its command line: ``driver``, an actor's class, a Ray daemon, or its program."""
    if pid == os.getpid():
        return "driver"
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().replace(b"\0", b" ").decode(errors="replace").split()
    except OSError:
        return "ended"
    if not words:
        return "unnamed"
    if words[0].startswith("ray::"):
        return words[0].removeprefix("ray::").split(".")[0].split("(")[0].rpartition(":")[2]
    return os.path.basename(words[0])


class Meter:
    """Measures a ``with`` block: ``cpu_s`` and ``peak_pss_mb`` of the whole process tree, ``cpu_by_role``."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self.cpu_by_role: dict[str, float] = {}
        self.peak_pss_mb = 0.0
        self._before: dict[int, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kimi_ray.bench.pss", daemon=True)

    def __enter__(self) -> Self:
        self._before = {pid: cpu_s([pid]) for pid in process_tree()}
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tree = process_tree()
        for pid in tree:
            used = cpu_s([pid]) - self._before.get(pid, 0.0)
            self.cpu_s += used
            if used > 0:
                name = role(pid)
                self.cpu_by_role[name] = round(self.cpu_by_role.get(name, 0.0) + used, 2)
        self._stop.set()
        self._thread.join()
        self.peak_pss_mb = max(self.peak_pss_mb, pss_mb(tree))

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.peak_pss_mb = max(self.peak_pss_mb, pss_mb(process_tree()))
