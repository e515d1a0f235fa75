"""A review swarm over a folder of source files: one agent a file, one row a file.

    python examples/review_swarm.py                          # this repository's own sources, scripted model, no network
    python examples/review_swarm.py src --glob '**/*.ts'     # another folder
    python examples/review_swarm.py src --model kimi-k2 --base-url http://127.0.0.1:8000/v1 --address local

Each agent gets the profile `explore` less Bash: it can read, and it cannot change anything.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import kimi_ray
from kimi_ray import Item, Limits

PROMPT = "Review the file {{file}}. In one sentence: what is it for, and what would you change first?"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent.parent / "kimi_ray" / "runs")
    parser.add_argument("--glob", default="**/*.py")
    parser.add_argument("--model", default="scripted", help="`scripted` reads the file and says what it saw")
    parser.add_argument("--base-url")
    parser.add_argument("--address", default="in-process", help="in-process, local (a Ray of its own) or HOST:PORT")
    parser.add_argument("--out", help="a run directory: run.json, results.jsonl, attempts.jsonl")
    arguments = parser.parse_args()

    folder = arguments.folder.resolve()
    files = sorted(path.relative_to(folder).as_posix() for path in folder.glob(arguments.glob))
    address = None if arguments.address == "local" else arguments.address

    async with kimi_ray.Runtime.connect(address=address) as runtime:
        model = runtime.resolve_model(arguments.model, arguments.base_url)
        # The session's directory is where its agents work.
        session = await runtime.workspace(folder).create_session(title=f"Review of {folder.name}", model=model)
        swarm = await session.start_swarm(
            PROMPT,
            # An item with an id of its own keeps its name in every row, log and resume.
            [Item(id=file, data={"file": file}) for file in files],
            model=model,
            max_concurrency=16,
            limits=Limits(max_steps=12, time_s=300),
            retries=1,
            out=arguments.out,
        )
        async for row in swarm:  # in order of completion
            print(f"{row.status:<10} {row.item_id:<28} {row.text or row.error}")
        report = await swarm.result()  # in order of the items

    print(f"\n{report.totals['completed']} of {len(report.rows)} completed, {report.usage.total} tokens")
    print(f"logs: kimi-ray sessions show {report.session_id}")
    report.raise_for_status()


if __name__ == "__main__":
    asyncio.run(main())
