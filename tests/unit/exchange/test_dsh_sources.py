"""What a path may be, which session an artifact is, and one bad artifact among good ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_ray.errors import ConfigError
from kimi_ray.exchange.dsh import read_source
from kimi_ray.exchange.dsh.header import decode_segment, encode_segment, project_key
from tests.unit.exchange.conftest import verdict
from tests.unit.exchange.dsh_writer import Database, batched, compressed, crashed, header, plain, put

EVENTS = crashed()
GOOD = (len(EVENTS), len(EVENTS) + 4)


def found(path: Path) -> dict[Any, Any]:
    return {reading.id: verdict(reading) for reading in read_source(str(path))}


def test_a_root_a_project_a_session_a_file(tmp_path: Path) -> None:
    one = put(tmp_path, header("one", "/a"), plain(header("one", "/a"), EVENTS))
    put(tmp_path, header("two", "/a"), plain(header("two", "/a"), EVENTS))
    put(tmp_path, header("three", None), compressed(header("three", None), batched(EVENTS)))
    assert found(tmp_path) == {"one": GOOD, "two": GOOD, "three": GOOD}
    assert found(tmp_path / "--a--") == {"one": GOOD, "two": GOOD}
    assert found(one.parent) == found(one) == {"one": GOOD}
    assert found(tmp_path / "_no-cwd" / "three") == {"three": GOOD}


def test_the_home_of_the_harness(tmp_path: Path) -> None:
    put(tmp_path / "sessions", header(), plain(header(), EVENTS))
    (tmp_path / "storages").mkdir()
    (tmp_path / "storages" / "workspace.json").write_text("{}")
    assert found(tmp_path) == {"s1": GOOD}


def test_a_file_that_lies_anywhere_is_the_session_that_its_header_names(tmp_path: Path) -> None:
    for name in ("copy.jsonl", "session.jsonl", "x"):
        (tmp_path / name).write_bytes(plain(header("inside"), EVENTS))
        assert found(tmp_path / name) == {"inside": GOOD}
    (tmp_path / "y").write_bytes(compressed(header("inside"), batched(EVENTS)))
    assert found(tmp_path / "y") == {"inside": GOOD}


def test_nothing_there(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "session.jsonl.deadbeef0123.tmp").write_bytes(b"x")
    for path, code in ((tmp_path, "import.nothing_found"), (tmp_path / "none", "import.not_found")):
        with pytest.raises(ConfigError) as caught:
            list(read_source(str(path)))
        assert caught.value.code == code and str(path) in caught.value.message


def test_what_is_neither_a_file_nor_a_directory(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to("circle")
    for path, said in (("pipe", "neither"), ("circle", "neither"), ("none", "there is no")):
        with pytest.raises(ConfigError, match=said) as caught:
            list(read_source(str(tmp_path / path)))
        assert caught.value.code == "import.not_found"
    with pytest.raises(ConfigError, match="empty"):
        list(read_source(""))


def test_odd_entries_of_a_root_are_told_or_are_no_sessions(tmp_path: Path) -> None:
    put(tmp_path, header("good"), plain(header("good"), EVENTS))
    project = tmp_path / "--p--"
    for name in ("pipe", "directory", "circle", "device"):
        (project / name).mkdir(parents=True)
    os.mkfifo(project / "pipe" / "session.jsonl")
    (project / "directory" / "session.jsonl").mkdir()
    (project / "circle" / "session.jsonl").symlink_to("session.jsonl")
    (project / "device" / "session.jsonl").symlink_to("/dev/zero")
    (project / "loop").symlink_to("loop")
    (tmp_path / "loop").symlink_to("loop")
    (project / "up").symlink_to("..")
    (tmp_path / "sessions.sqlite").write_bytes(b"no database" * 100)
    readings = {reading.id: reading for reading in read_source(str(tmp_path))}
    assert verdict(readings.pop("good")) == GOOD
    assert set(readings) == {"pipe", "directory", "circle", "device", None}
    errors = {key: reading.error for key, reading in readings.items()}
    assert all(error is not None and error.kind == "corrupt" for error in errors.values())
    assert "not a regular file" in str(errors["pipe"]) and "not a database" in str(errors[None])


def test_directories_that_may_not_be_read_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the refusal is made up."""
    put(tmp_path, header("good", "/a"), plain(header("good", "/a"), EVENTS))
    closed = put(tmp_path, header("shut", "/b"), plain(header("shut", "/b"), EVENTS)).parent.parent
    scan = os.scandir

    def scandir(path: Any) -> Any:
        if str(path) == str(closed):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    good, shut = list(read_source(str(tmp_path)))
    assert verdict(good) == GOOD and shut.source == str(closed) and "Permission denied" in str(shut.error)
    (only,) = list(read_source(str(closed)))
    assert "Permission denied" in str(only.error)


def test_the_directory_must_be_the_one_that_the_header_demands(tmp_path: Path) -> None:
    put(tmp_path, header("one"), plain(header("other"), EVENTS), name="one")
    put(tmp_path, header("two"), plain(header("two", "/elsewhere"), EVENTS))
    put(tmp_path, header("three"), plain(header("three", None), EVENTS))
    put(tmp_path, header("four"), plain(header("four"), EVENTS), project="_no-cwd")
    put(tmp_path, header("good"), plain(header("good"), EVENTS))
    readings = {reading.id: reading for reading in read_source(str(tmp_path))}
    assert {name: verdict(one) for name, one in readings.items()} == {
        **dict.fromkeys(("one", "two", "three", "four"), "corrupt"),
        "good": GOOD,
    }
    one, two = readings["one"], readings["two"]
    assert one.header is not None and one.header["id"] == "other"
    assert 'requested "one", header contains "other"' in str(one.error)
    assert 'identify "--elsewhere--/two"' in str(two.error)


def test_one_id_in_two_projects(tmp_path: Path) -> None:
    put(tmp_path, header("twin", "/a"), plain(header("twin", "/a"), EVENTS))
    put(tmp_path, header("twin", "/b"), plain(header("twin", "/b"), EVENTS))
    put(tmp_path, header("single", "/b"), plain(header("single", "/b"), EVENTS))
    readings = list(read_source(str(tmp_path)))
    assert sorted((reading.id, verdict(reading)) for reading in readings if reading.id == "twin") == [
        ("twin", "corrupt"),
        ("twin", "corrupt"),
    ]
    assert found(tmp_path)["single"] == GOOD
    assert "appears in multiple project directories" in str(readings[0].error)
    assert found(tmp_path / "--a--") == {"twin": GOOD}


def test_both_encodings_of_one_session(tmp_path: Path) -> None:
    put(tmp_path, header(), plain(header(), EVENTS))
    (tmp_path / "--work-crash--" / "s1" / "session.jsonl.zstd").write_bytes(compressed(header(), batched(EVENTS)))
    (reading,) = read_source(str(tmp_path))
    assert verdict(reading) == "corrupt" and "opposite encoding" in str(reading.error)


def test_sessions_of_both_encodings_in_one_root(tmp_path: Path) -> None:
    """On purpose less strict than the original, which then reads none of them: each verifies by itself."""
    put(tmp_path, header("a"), plain(header("a"), EVENTS))
    put(tmp_path, header("b"), compressed(header("b"), batched(EVENTS)))
    assert found(tmp_path) == {"a": GOOD, "b": GOOD}


def test_flat_files_of_old(tmp_path: Path) -> None:
    put(tmp_path, header("a"), plain(header("a"), EVENTS))
    flat = tmp_path / "--work-crash--" / "old.jsonl"
    flat.write_bytes(plain(header("old"), EVENTS))
    assert found(tmp_path) == {"a": GOOD, "old": "unsupported"}
    assert found(flat) == {"old": GOOD}


def test_a_bad_artifact_does_not_poison_the_listing(tmp_path: Path) -> None:
    broken = bytearray(compressed(header("bad"), batched(EVENTS)))
    broken[30] ^= 4
    put(tmp_path, header("bad"), bytes(broken))
    put(tmp_path, header("good"), compressed(header("good"), batched(EVENTS)))
    put(tmp_path, header("empty"), b"")
    assert found(tmp_path) == {"bad": "corrupt", "good": GOOD, "empty": "corrupt"}
    headers = {reading.id: reading.header for reading in read_source(str(tmp_path))}
    assert headers["bad"] is None and headers["empty"] is None and headers["good"] == header("good")


def test_several_databases(tmp_path: Path) -> None:
    for name in ("a", "b"):
        base = Database(tmp_path / f"{name}.sqlite")
        base.session(header(name), EVENTS)
        base.close()
    (tmp_path / "notes.txt").write_text("SQLite")
    assert found(tmp_path) == {"a": GOOD, "b": GOOD}


def test_nothing_is_touched(tmp_path: Path, untouched: Callable[[Path], Any]) -> None:
    for number, data in enumerate((plain(header("s0"), EVENTS), compressed(header("s1"), batched(EVENTS))[:-7])):
        put(tmp_path, header(f"s{number}"), data)
    before, names = untouched(tmp_path), sorted(os.walk(tmp_path))
    assert len(found(tmp_path)) == 2
    assert untouched(tmp_path) == before and sorted(os.walk(tmp_path)) == names


@pytest.mark.parametrize(
    ("cwd", "key"),
    [
        ("/work/full", "--work-full--"),
        ("/", "--root--"),
        ("C:\\a\\b", "--C-a-b--"),
        ("/a//b c~", "--a-b~0020c~007E--"),
        ("/工", "--~5DE5--"),
        ("/🚀", "--~D83D~DE80--"),
        ("/" + "x" * 300, "--" + "x" * 251 + "--"),
        (None, "_no-cwd"),
        ("", None),
    ],
)
def test_project_directories(cwd: Any, key: Any) -> None:
    assert project_key(cwd) == key


def test_session_directories() -> None:
    assert [encode_segment(one) for one in (".", "..", "a/b", "~", "", "🚀")] == [
        "~002E",
        "~002E~002E",
        "a~002Fb",
        "~007E",
        None,
        "~D83D~DE80",
    ]
    assert decode_segment("a b") is None and decode_segment("~zzzz") is None and decode_segment("~0041") is None


@given(st.text(alphabet=st.characters(codec=None, exclude_categories=()), min_size=1, max_size=12))
def test_a_session_directory_gives_its_id_back(session_id: str) -> None:
    segment = encode_segment(session_id)
    assert segment is not None and segment.isascii() and "/" not in segment
    assert decode_segment(segment) == session_id
