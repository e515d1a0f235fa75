"""Frames as files: what other libraries read of them, all or none, and how little is held and decoded on the way."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest

from kimi_ray import frames
from kimi_ray.errors import KimiRayError
from kimi_ray.frames import schemas
from tests.unit.frames.homes import Scribe, eventful, pylist, row_of, run_directory, store_logs

DOCS = Path(__file__).parents[3] / "docs"
S = "session_one"


async def test_files_that_every_reader_opens(tmp_path: Path) -> None:
    await store_logs(tmp_path / "home", [eventful()])
    report = frames.write_parquet(S, tmp_path / "deep" / "out", home=tmp_path / "home")
    assert report.ok and report.rows == {"rows": 1, "steps": 3, "model_calls": 4, "tool_calls": 3, "messages": 8}
    assert sorted(path.name for path in (tmp_path / "deep" / "out").iterdir()) == sorted(
        f"{n}.parquet" for n in frames.FRAMES
    )
    import pyarrow.parquet as pq

    for name, path in report.files.items():
        stored = pq.read_table(path)
        assert stored.schema.equals(schemas.arrow_schema(pa, name))
        assert stored.to_pylist() == frames.tables(S, [name], home=tmp_path / "home")[name].to_pylist()
    duckdb, pandas, polars = (pytest.importorskip(name) for name in ("duckdb", "pandas", "polars"))
    calls = report.files["tool_calls"]
    query = f"select name, count(*), sum(run_ms)::bigint from '{calls}' group by name order by name"
    assert duckdb.sql(query).fetchall() == [("Bash", 1, 2), ("Read", 2, 7)]
    assert duckdb.sql(f"select max(ended - started) from '{report.files['steps']}'").fetchall()
    frame = pandas.read_parquet(report.files["messages"])
    assert frame["text"].iloc[0] == "first, ünïcödé 🦆" and str(frame["time"].dtype).startswith("datetime64[ms, UTC")
    lazy = polars.read_parquet(report.files["model_calls"])
    assert lazy["outcome"].to_list() == ["failed", "answered", "answered", "cut"]
    assert lazy["ended"].dtype == polars.Datetime("ms", "UTC")


async def test_files_appear_all_or_not_at_all(tmp_path: Path) -> None:
    await store_logs(tmp_path / "home", [eventful()])
    out = tmp_path / "out"
    frames.write_parquet(S, out, ["steps"], home=tmp_path / "home")
    before = (out / "steps.parquet").read_bytes()
    with pytest.raises(KimiRayError) as caught:
        frames.write_parquet(S, out, home=tmp_path / "home")
    assert caught.value.code == "export.exists" and [path.name for path in out.iterdir()] == ["steps.parquet"]
    with pytest.raises(KimiRayError, match=r"session\.not_found"):
        frames.write_parquet([S, "session_two"], out, home=tmp_path / "home", force=True)
    assert [path.name for path in out.iterdir()] == ["steps.parquet"] and (out / "steps.parquet").read_bytes() == before
    with pytest.raises(KimiRayError, match=r"session\.not_found"):
        frames.write_parquet("session_two", tmp_path / "new", home=tmp_path / "home")
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(KimiRayError, match=r"export\.failed"):
        frames.write_parquet(S, tmp_path / "file" / "x", home=tmp_path / "home")
    assert frames.write_parquet(S, out, home=tmp_path / "home", force=True).ok


async def test_only_what_a_frame_needs_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kimi_ray.frames import reading

    log = eventful()
    log.turn()
    log.step()
    for _ in range(50):
        chunk = {"type": "text-delta", "index": 0, "text": "x"}
        log.add("assistant/chunk", **log.where, attempt=1, chunk=chunk)
    await store_logs(tmp_path, [log])
    decoded: list[bytes] = []
    real = reading.from_json
    monkeypatch.setattr(reading, "from_json", lambda data, **options: (decoded.append(data), real(data, **options))[1])
    assert frames.tool_calls(S, home=tmp_path).num_rows == 3
    kinds = set(re.findall(rb'"type":"([a-z]+/[a-z-]+)","data"', b"".join(decoded)))
    assert kinds == {b"assistant/message", b"tool/call", b"tool/result", b"turn/start"}


async def test_rows_of_many_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kimi_ray.frames import batches

    monkeypatch.setattr(batches, "BATCH_ROWS", 7)
    log = Scribe()
    for n in range(50):
        log.plain_turn(str(n))
    await store_logs(tmp_path, [log])
    table = frames.messages(S, home=tmp_path)
    assert table.column("text").num_chunks > 10 and pylist(table, "text")[::2] == [str(n) for n in range(50)]
    assert pylist(table, "seq") == sorted(pylist(table, "seq"))


async def test_what_the_docs_show_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    duckdb = pytest.importorskip("duckdb")
    log = Scribe()
    log.plain_turn("one")
    first, last = log.log.surface.seqs
    log.user("a summary", kind="compaction", surface={"replace": [first, last]}, sources=[first, last])
    log.plain_turn("two")
    at = log.log.surface.seqs[-2:]
    log.log.append(
        "surface/cut", {"reason": "undo", "prompts": []}, surface={"replace": [at[0], at[-1]]}, sources=list(at)
    )
    log.plain_turn("three")
    await store_logs(tmp_path / "home", [log, eventful_in("session_two")])
    monkeypatch.chdir(tmp_path)
    frames.write_parquet([S, "session_two"], "frames", home="home")
    page = (DOCS / "frames.md").read_text()
    query, join = re.findall(r"^```sql\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    seen = duckdb.sql(query).fetchall()
    assert seen[:3] == [("user", "a summary"), ("user", "three"), ("assistant", "did three")] and len(seen) == 3 + 8
    shown = re.findall(r'^duckdb\.sql\("(.*)"\)$', page, re.MULTILINE) + re.findall(
        r'duckdb -c "(.*)"$', page, re.MULTILINE
    )
    assert len(shown) == 3
    for one in shown:
        assert duckdb.sql(one).fetchall()
    rollout = eventful_in("session_run")
    of_run = {"run_id": "run_a", "item_id": "7dabfda0e312", "repeat": 0, "attempt": 1}
    rollout.header = rollout.header.model_copy(update=of_run)
    await store_logs(tmp_path / "runs", [rollout])
    row = row_of("7dabfda0e312").model_copy(update={"item": "src/one.py"})
    run = run_directory(tmp_path / "run", tmp_path / "runs", [row])
    frames.write_parquet(run, "of_run")
    joined = duckdb.sql(join.replace("'frames/", "'of_run/")).fetchall()
    assert len(joined) == 3 and {line[:3] for line in joined} == {("src/one.py", 0, 1)}
    polars = pytest.importorskip("polars")
    lazy = polars.scan_parquet("frames/model_calls.parquet")
    assert lazy.filter(polars.col("ttft_ms") > 2).collect().height == 7
    pandas = pytest.importorskip("pandas")
    steps = pandas.read_parquet("frames/steps.parquet", dtype_backend="pyarrow")
    assert str(steps["cached_tokens"].dtype) == "int64[pyarrow]"


def eventful_in(session_id: str) -> Scribe:
    """The eventful log, in another session."""
    log = eventful()
    log.header = log.header.model_copy(update={"session_id": session_id})
    return log
