"""Flags that several commands share: one name, one meaning, one help text."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, and nothing else there.")]
Home = Annotated[
    str | None, typer.Option("--home", metavar="DIR", help="Where logs are kept. [KIMI_RAY_HOME, ~/.kimi-ray]")
]
Address = Annotated[
    str | None,
    typer.Option("--address", metavar="HOST:PORT", help="A Ray cluster to join; `in-process` runs without Ray."),
]
InProcess = Annotated[bool, typer.Option("--in-process", help="The same as --address in-process.")]
Namespace = Annotated[str | None, typer.Option("--namespace", metavar="NAME", help="Ray namespace. [kimi_ray]")]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="NAME", help="A [models.NAME] table, a name on the server of --base-url, or `scripted`."
    ),
]
BaseUrl = Annotated[
    str | None, typer.Option("--base-url", metavar="URL", help="A Chat Completions server. [OPENAI_BASE_URL]")
]
