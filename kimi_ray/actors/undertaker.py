"""A small process beside a local Ray that ends what outlives the driver.

The kernel kills a local Ray's GCS and raylet with the driver, and the workers follow within two seconds; Ray's two
node agents, though, then try for a minute to report to the dead GCS. The undertaker holds a pipe to the driver; when
it closes, it waits a moment and kills what is left of the session: processes that carry its mark in their environment,
and those with a title of Ray's (setting a title may wipe the environment) that hold files of the session's directory,
whose path the driver writes into the pipe. It imports nothing but the standard library and is run by path:
``python -S -E undertaker.py <mark>``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

MARK_VARIABLE = "_KIMI_RAY_LOCAL_RAY"
GRACE_S = 2.5
ROUNDS = 20
PAUSE_S = 0.1


def start_undertaker(mark: str) -> subprocess.Popen[bytes] | None:
    """Start it; its pipe closes with this process. None where there is no ``/proc`` to find processes in."""
    if not os.path.isdir("/proc/self"):
        return None
    environment = {name: value for name, value in os.environ.items() if name != MARK_VARIABLE}
    return subprocess.Popen(
        [sys.executable, "-S", "-E", os.path.abspath(__file__), mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
        cwd="/",
    )


def tell_directory(undertaker: subprocess.Popen[bytes] | None, directory: str) -> None:
    """Where the local Ray's session has its files."""
    if undertaker is not None and undertaker.stdin is not None:
        undertaker.stdin.write(directory.encode() + b"\n")
        undertaker.stdin.flush()


def dismiss(undertaker: subprocess.Popen[bytes] | None) -> None:
    """The local Ray was shut down: let it look after what is left, in its own time."""
    if undertaker is not None and undertaker.stdin is not None:
        undertaker.stdin.close()
        # Nobody waits for it: it ends by itself in a few seconds.
        undertaker.returncode = 0


def left_of(mark: str, directory: str) -> list[int]:
    """The processes of the session. ``directory`` may be empty."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    return [pid for pid in pids if _carries(pid, wanted) or (directory and _holds(pid, directory))]


def bury(mark: str, directory: str) -> None:
    """Kill what is left of the session, again until there is nothing."""
    ends = time.monotonic() + GRACE_S
    while time.monotonic() < ends and left_of(mark, directory):
        time.sleep(PAUSE_S)
    for _ in range(ROUNDS):
        left = left_of(mark, directory)
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        time.sleep(PAUSE_S)


def main() -> None:
    """Wait for the driver's end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    told = b""
    while part := os.read(0, 4096):
        told += part
    bury(sys.argv[1], told.decode().strip())


def _carries(pid: int, wanted: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return wanted in file.read().split(b"\0")
    except OSError:
        return False


def _holds(pid: int, directory: str) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if file.read(5) != b"ray::":
                return False
        files = [os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return False
    return any(path.startswith(f"{directory}/") for path in files)


if __name__ == "__main__":
    main()
