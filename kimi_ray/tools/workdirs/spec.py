"""The command line's form of a working directory, and the refusals that every kind shares."""

from __future__ import annotations

from kimi_ray.errors import ToolError
from kimi_ray.settings import Workdir

FORMS = "none, shared[:PATH], copy[:PATH], git:REPO@REF, factory:package.module:function"


def parse_workdir(text: str, default_path: str | None = None) -> Workdir:
    """The form of the command line: ``copy``, ``copy:PATH``, ``shared``, ``shared:PATH``, ``none``,
    ``git:REPO@REF``, ``factory:package.module:function``. Placeholders such as ``{{repo}}`` are left as they are.

    Args:
        default_path: The directory when ``copy`` or ``shared`` names none.

    Raises:
        ToolError: ``workdir.invalid``.
    """
    kind, _, rest = text.strip().partition(":")
    if kind == "none" and not rest:
        return Workdir.none()
    if kind in ("shared", "copy"):
        path = rest or default_path
        if not path:
            raise invalid(text, "it names no directory")
        return Workdir.shared(path) if kind == "shared" else Workdir.copy(path)
    if kind == "git":
        repo, _, ref = rest.rpartition("@")
        if not repo or not ref:
            raise invalid(text, "it must name a repository and a commit: git:REPO@REF")
        workdir = Workdir(kind="git", path=repo, ref=ref)
        refuse_remote(workdir)
        return workdir
    if kind == "factory":
        module, _, function = rest.partition(":")
        if not module or not function:
            raise invalid(text, "it must name a function: factory:package.module:function")
        return Workdir.factory(rest)
    raise invalid(text, f"there is no kind {kind[:40]!r}")


def refuse_remote(workdir: Workdir) -> None:
    """Nothing is fetched from elsewhere for an agent's directory.

    Raises:
        ToolError: ``workdir.invalid``.
    """
    if workdir.is_remote:
        raise invalid(
            str(workdir.path),
            "the repository is not on this machine",
            hint="clone it first (git clone, with --bare it is enough) and name the clone",
        )


def invalid(text: str, why: str, hint: str | None = None) -> ToolError:
    """What was said about a working directory makes no sense."""
    return ToolError(
        f"the workdir {text[:200]!r} cannot be used: {why}",
        code="workdir.invalid",
        hint=hint if hint is not None else f"use one of {FORMS}",
        details={"workdir": text[:1000]},
    )
