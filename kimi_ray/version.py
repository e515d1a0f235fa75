"""The version of kimi_ray, in the one place that everything reads."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _installed() -> str:
    try:
        return version("kimi-ray")
    except PackageNotFoundError:
        return "0+source"


__version__ = _installed()
