"""``sessions export``: what the command prints, where it writes, and how it ends."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Cli

ROOT = Path(__file__).parents[3]


@pytest.fixture
def session(cli: Cli, place: Path) -> str:
    result = cli("run", "hello", "--model", "scripted", "--profile", "bare", "--json")
    assert result.code == 0
    return result.document["session_id"]


def test_a_file_of_its_own_name(cli: Cli, place: Path, session: str) -> None:
    result = cli("sessions", "export", "@last")
    assert result.code == 0 and f"{session}: 1 agent, " in result.out and f"in {session}.zip" in result.out
    checked = cli("sessions", "export", "--check", f"{session}.zip")
    assert checked.code == 0 and checked.out.startswith(f"{session}.zip: ok, 1 agent, ")
    again = cli("sessions", "export", session)
    assert again.code == 2 and "code: export.exists" in again.err
    document = cli("sessions", "export", session, "--force", "--json").document
    assert document["ok"] and document["out"] == f"{session}.zip" and document["problems"] == []
    check = cli("sessions", "export", "--check", f"{session}.zip", "--json").document
    assert (check["ok"], check["events"]) == (True, document["agents"][0]["events"])
    other = cli("sessions", "export", session[-8:], "--out", "an other.zip", "--format", "zip")
    assert other.code == 0 and (place / "an other.zip").read_bytes() == (place / f"{session}.zip").read_bytes()


def test_to_stdout(place: Path, home: Path, session: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kimi_ray.cli", "sessions", "export", "@last", "--out", "-"],
        env={"PYTHONPATH": str(ROOT), "KIMI_RAY_HOME": str(home), "PATH": ""},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(io.BytesIO(done.stdout)) as found:
        assert json.loads(found.read("manifest.json"))["session"]["session_id"] == session
    assert session in done.stderr.decode()


def test_damage_is_exit_code_one_and_the_rest_is_there(cli: Cli, place: Path, home: Path, session: str) -> None:
    (document,) = home.rglob("state.json")
    document.write_bytes(b"{")
    result = cli("sessions", "export", session, "--out", "a.zip")
    assert result.code == 1 and "store.corrupt" in result.err
    assert cli("sessions", "export", "--check", "a.zip").code == 0
    (place / "a.zip").write_bytes((place / "a.zip").read_bytes()[:-30])
    broken = cli("sessions", "export", "--check", "a.zip", "--json")
    assert broken.code == 2 and broken.document["error"]["code"] == "export.not_an_archive"


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("nobody",),
        ("@last", "--format", "tar"),
        ("@last", "--out", "-", "--json"),
        ("@last", "--check", "x"),
        ("--check", "missing.zip"),
        ("@last", "--out", "no/such/place.zip"),
    ],
)
def test_refusals(cli: Cli, session: str, words: tuple[str, ...]) -> None:
    result = cli("sessions", "export", *words)
    said = (result.out + result.err).replace(chr(34), "")
    assert result.code == 2 and "code:" in said and "hint:" in said, result


def test_nothing_heavy_is_imported(place: Path, home: Path, session: str) -> None:
    code = (
        "import sys; from kimi_ray.cli.app import run_command;"
        "code = run_command(['sessions', 'export', '@last']);"
        "heavy = {'ray', 'openai', 'pyarrow', 'rich', 'dishka'} & set(sys.modules);"
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)"
    )
    environment = {"PYTHONPATH": str(ROOT), "KIMI_RAY_HOME": str(home), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
