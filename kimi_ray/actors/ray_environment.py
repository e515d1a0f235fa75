"""What surrounds Ray in a driver: environment, token, and where its lines go instead of the terminal."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from kimi_ray.actors.undertaker import MARK_VARIABLE
from kimi_ray.config import RuntimeConfig

LOG_NAME = "driver-ray.log"
LOG_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"

_TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def quiet_environment() -> None:
    """What must be in the environment before Ray is imported; what the user set stays."""
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ.setdefault("RAY_USE_UVLOOP", "0")


def quiet_logger(log_path: str) -> None:
    """Ray's lines go to a file: nothing of it on stdout or stderr."""
    logger = logging.getLogger("ray")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.addHandler(logging.FileHandler(log_path, delay=True))
    logger.propagate = False


def driver_log_path(config: RuntimeConfig) -> str:
    """``<home>/logs/driver-ray.log``; a home that is not here (it may be on another node) is not created for it."""
    home = Path(config.home)
    local = config.address is None or home.is_dir()
    logs = home / "logs" if local else Path(tempfile.gettempdir()) / f"kimi_ray-{os.getuid()}" / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return os.devnull  # the store tells what is wrong with the home
    return str(logs / LOG_NAME)


@contextlib.contextmanager
def pushed_messages_logged() -> Generator[None]:
    """Ray prints what raylets push to drivers (out of memory, failing workers) on stdout; have it logged instead."""
    worker: Any = importlib.import_module("ray._private.worker")
    before = worker.print_to_stdstream

    def log(data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        for line in data.get("lines") or ():
            logging.getLogger("ray").warning("%s", line)

    worker.print_to_stdstream = log
    try:
        yield
    finally:
        worker.print_to_stdstream = before


@contextlib.contextmanager
def own_token() -> Generator[None]:
    """A random token for a local Ray, in the environment only, unless the user has one or turned tokens off.

    Ray turns the token mode on by itself when it starts.
    """
    if os.environ.get("RAY_AUTH_MODE") or has_token():
        yield
        return
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    _forget_token()
    try:
        yield
    finally:
        for name in _TOKEN_VARIABLES:
            os.environ.pop(name, None)
        _forget_token()


@contextlib.contextmanager
def found_token() -> Generator[None]:
    """Token mode for joining a cluster when there is a token; Ray's client would leave the token unused."""
    if os.environ.get("RAY_AUTH_MODE") or not has_token():
        yield
        return
    os.environ["RAY_AUTH_MODE"] = "token"
    _forget_token()
    try:
        yield
    finally:
        os.environ.pop("RAY_AUTH_MODE", None)
        _forget_token()


def has_token() -> bool:
    """Whether the user has a token where Ray looks for one."""
    named = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    return bool(named) or (Path.home() / ".ray" / "auth_token").exists()


@contextlib.contextmanager
def inherited(mark: str) -> Generator[None]:
    """What only a local Ray's processes see: where kimi_ray is imported from, and the undertaker's mark."""
    root = str(Path(__file__).resolve().parents[2])
    present = os.environ.get("PYTHONPATH") or ""
    parts = [root, *(os.path.abspath(part) for part in present.split(os.pathsep) if part)]
    changes = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(parts)), MARK_VARIABLE: mark}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def session_directory() -> str:
    """Where the Ray of this process keeps its files."""
    worker: Any = importlib.import_module("ray._private.worker")
    return str(worker._global_node.get_session_dir_path())


def _forget_token() -> None:
    """Ray's client reads mode and token once; have it look again."""
    raylet = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()
