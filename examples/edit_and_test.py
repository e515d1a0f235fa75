"""One agent that mends a bug in a copy of a project and runs its tests there. The original is not touched.

    python examples/edit_and_test.py

The model is scripted: it reads, edits, tests, and tells, as a real one would. Everything else is real: the copied
directory, the edit, the test run.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import kimi_ray
from kimi_ray import Limits, Workdir

FILES = {
    "fair.py": "def share(total, people):\n    return total / people + 1\n",
    "test_fair.py": """import unittest
from fair import share


class TestShare(unittest.TestCase):
    def test_equal_parts(self):
        self.assertEqual(share(12, 4), 3)


if __name__ == "__main__":
    unittest.main()
""",
}

# What the scripted model says, step by step; a real model needs only `model="..."`.
TEST = f"'{sys.executable}' -m unittest -v test_fair"
SCRIPT = [
    {"tool_calls": [{"name": "Bash", "arguments": {"command": TEST}}]},
    {"tool_calls": [{"name": "Read", "arguments": {"path": "fair.py"}}]},
    {
        "tool_calls": [
            {
                "name": "Edit",
                "arguments": {
                    "path": "fair.py",
                    "old_string": "total / people + 1",
                    "new_string": "total / people",
                },
            }
        ]
    },
    {"tool_calls": [{"name": "Bash", "arguments": {"command": TEST}}]},
    {"text": "share() added 1 to every part. I removed that; the test passes."},
]


async def mend(project: Path) -> str:
    models = {"mender": {"provider": "scripted", "script": SCRIPT}}
    async with kimi_ray.Runtime.connect(address="in-process", config={"models": models}) as runtime:
        session = await runtime.workspace(project).create_session(
            profile="coder",
            model="mender",
            # A private copy, made where the agent runs and removed with it. `Workdir.shared(path)` would work in the
            # project itself.
            workdir=Workdir.copy(str(project)),
            limits=Limits(max_steps=20),
        )
        prompt = await session.main.submit("The test fails. Find out why, mend it, and run the test again.")
        result = (await prompt.result()).raise_for_state()

        async for event in session.main.events():
            if event.type == "tool/call":
                print(f"{event.data['name']:<5} {event.data['arguments']}")
            elif event.type == "tool/result":
                print(f"      exit code {event.data.get('exit_code', '-')}")
        return result.text


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder, "project")
        project.mkdir()
        for name, text in FILES.items():
            (project / name).write_text(text)
        print(asyncio.run(mend(project)))
        print("the original is as it was:", (project / "fair.py").read_text() == FILES["fair.py"])


if __name__ == "__main__":
    main()
