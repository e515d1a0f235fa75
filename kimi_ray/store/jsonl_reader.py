"""Everything that only reads a JSONL home: beside a live writer, without a claim, without writing a byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.ids import is_path_safe_id
from kimi_ray.store.batch_rows import EpochRow
from kimi_ray.store.blobs import Blobs
from kimi_ray.store.directories import Directories
from kimi_ray.store.documents import Documents
from kimi_ray.store.framing import Framing, framing_of
from kimi_ray.store.fs import Fs, io_errors, names_in
from kimi_ray.store.layout import Layout, not_found
from kimi_ray.store.log_files import LogSource, open_log
from kimi_ray.store.log_read import Judged, judge, read_page
from kimi_ray.store.log_scan import parse_header
from kimi_ray.store.recovery import check_not_removed
from kimi_ray.store.seam import (
    Document,
    ListedLog,
    LogSnapshot,
    LogView,
    Page,
    StoreIdentity,
    Stream,
    SurvivingPage,
    VerifyReport,
)
from kimi_ray.store.stream_log import StreamLog
from kimi_ray.store.survey import KnownLog, Survey, survey, survey_known
from kimi_ray.store.surviving import surviving_page
from kimi_ray.store.unpublished import Unpublished, unpublished_in
from kimi_ray.store.verify import verify_log

R = TypeVar("R")
_JUDGED_MOST = 64
_TRIES = 3


def boot_id() -> str:
    """The kernel's id of this boot: while it is the same, nothing written was lost by a power cut. Empty if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


class JsonlReader:
    """Blocking reads of one home. Where the process also writes, the ``StreamLog`` says how far its log is written."""

    def __init__(
        self,
        fs: Fs,
        layout: Layout,
        documents: Documents,
        blobs: Blobs,
        boot: str,
        identity: StoreIdentity,
        unpublished: Unpublished,
    ) -> None:
        self._fs = fs
        self._unpublished = unpublished
        self._framing: Framing = framing_of(identity.compression)
        self._home_id = identity.home_id
        self._judged: dict[str, tuple[str, Judged]] = {}
        self._layout = layout
        self._documents = documents
        self._blobs = blobs
        self._boot = boot

    def _directory(self, stream: Stream) -> str:
        directory = self._where(stream)
        if self._unpublished.hides(stream.session_id):
            raise not_found(stream)
        return directory

    def _where(self, stream: Stream) -> str:
        """The directory of a log, published or not."""
        check_not_removed(self._layout, stream.session_id)
        directory = self._layout.agent_dir(stream)
        if directory is None:
            raise not_found(stream)
        return directory

    def survey(self, stream: Stream, log: StreamLog | None) -> Survey:
        """What a log is: all of it verified, or what the process that writes it knows. See ``survey.survey``."""
        directory = self._directory(stream)
        known = None if log is None else _known(log)
        with io_errors(directory):
            if known is not None:
                with self._open(stream, known.size) as source:
                    return survey_known(self._framing, source, known)
            size = _written(log)[0]
            return self.steady(
                stream, lambda: survey(self._fs, directory, self._framing, stream, self._boot, size=size)
            )

    def inspect(self, stream: Stream) -> LogView:
        """See ``Store.inspect``."""
        return self.survey(stream, None).view()

    def read_from(
        self,
        stream: Stream,
        seq: int,
        limit: int,
        max_bytes: int,
        log: StreamLog | None = None,
        *,
        chunks: bool = True,
    ) -> Page:
        """See ``Store.read_from``."""
        directory = self._directory(stream)
        size, next_seq, epoch = _written(log)

        def page() -> Page | None:
            with self._open(stream, size) as source:
                judged = lambda: self._judge(stream, source)  # noqa: E731
                return read_page(
                    self._framing,
                    source,
                    seq,
                    limit,
                    max_bytes,
                    next_seq=next_seq,
                    epoch=epoch,
                    judged=judged,
                    chunks=chunks,
                )

        with io_errors(directory):
            found = page() if size is not None else self.steady(stream, page)
        if found is None:
            raise not_found(stream)
        return found

    def _open(self, stream: Stream, size: int | None = None, *, repaired: bool = True) -> LogSource:
        try:
            return open_log(self._fs, self._where(stream), self._framing, size=size, repaired=repaired)
        except (FileNotFoundError, NotADirectoryError):
            raise not_found(stream) from None

    def steady(self, stream: Stream, read: Callable[[], R]) -> R:
        """Read beside a writer: what looks damaged while it takes back half a write, or repairs, is looked at again."""
        for _ in range(_TRIES - 1):
            before = self.revision(stream)
            try:
                return read()
            except StoreError as error:
                if error.code != "store.corrupt" or self.revision(stream) == before:
                    raise
        return read()

    def _judge(self, stream: Stream, source: LogSource) -> Judged:
        """``judge``, remembered while the file stays as it is: every page of a torn log asks."""
        revision = f"{self.revision(stream)}:{source.size}"
        known = self._judged.get(source.path)
        if known is not None and known[0] == revision:
            return known[1]
        found = judge(self._framing, source, self._boot)
        if len(self._judged) >= _JUDGED_MOST:
            self._judged.clear()
        self._judged[source.path] = (revision, found)
        return found

    def opener(self, stream: Stream, log: StreamLog | None) -> Callable[[], LogSource]:
        """What opens the log for reading, as far as it is written."""

        def opened() -> LogSource:
            self._directory(stream)
            return self._open(stream, _written(log)[0])

        return opened

    def verify(self, stream: Stream, log: StreamLog | None = None) -> VerifyReport:
        """See ``verify.verify_log``."""
        directory = self._directory(stream)
        with io_errors(directory):
            return verify_log(self._fs, directory, self._framing, stream, self._boot, size=_written(log)[0])

    def list_logs(self, session_id: str | None) -> list[ListedLog]:
        """See ``Store.list_logs``."""
        if session_id is None:
            return self._unpublished.seen(self.all_logs, lambda row: row.stream.session_id)
        directory = self._layout.session_dir(session_id)
        if directory is None or self._unpublished.hides(session_id):
            return []
        return self._logs_of([(directory.rsplit("/", 2)[-2], session_id)])

    def all_logs(self) -> list[ListedLog]:
        """Headers of all logs, those of unpublished sessions too."""
        return self._logs_of(self._layout.all_sessions())

    def _logs_of(self, sessions: list[tuple[str, str]]) -> list[ListedLog]:
        found: list[ListedLog] = []
        for workspace, session in sessions:
            agents = f"{self._layout.sessions}/{workspace}/{session}/agents"
            for agent in filter(is_path_safe_id, names_in(self._fs, agents)):
                row = self._listed(Stream(session, agent), f"{agents}/{agent}")
                if row is not None:
                    found.append(row)
        return found

    def _listed(self, stream: Stream, directory: str) -> ListedLog | None:
        path = f"{directory}/{self._framing.log_name}"
        try:
            with io_errors(path):
                try:
                    source = open_log(self._fs, directory, self._framing)
                except (FileNotFoundError, NotADirectoryError):
                    return None
                with source:
                    line = self._framing.probe(source.read, source.size).header_line()
            if line is None:
                raise not_found(stream).with_details(unborn=True)
            return ListedLog(stream, parse_header(line, path), path)
        except KimiRayError as error:
            return ListedLog(stream, None, path, error.to_data())

    def snapshots(self, session_id: str | None) -> list[LogSnapshot]:
        """See ``Store.snapshots``."""
        found: list[LogSnapshot] = []
        for row in self.list_logs(session_id):
            try:
                revision = self.revision(row.stream)
            except KimiRayError as error:
                if error.code not in ("store.not_found", "store.deleted"):
                    found.append(LogSnapshot(row.stream, "", row.header, row.error or error.to_data()))
                continue
            found.append(LogSnapshot(row.stream, revision, row.header, row.error))
        return found

    def revision(self, stream: Stream) -> str:
        """See ``Store.revision``: which file, and which state of it."""
        path = f"{self._directory(stream)}/{self._framing.log_name}"
        with io_errors(path):
            try:
                found = self._fs.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                raise not_found(stream) from None
        state = f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}"
        return f"{self._home_id}:{state}"

    def read_surviving(self, stream: Stream, cursor: int, limit: int) -> SurvivingPage:
        """See ``Store.read_surviving``."""
        self._directory(stream)
        return self.surviving(stream, cursor, limit)

    def surviving(self, stream: Stream, cursor: int, limit: int) -> SurvivingPage:
        """As ``read_surviving``, of an unpublished session too."""
        with io_errors(self._layout.home):
            try:
                source = self._open(stream)
            except StoreError as error:  # a repair beside it that is damaged: its rows are in the log all the same
                if error.code != "store.corrupt":
                    raise
                source = self._open(stream, repaired=False)
            with source:
                return surviving_page(self._framing, source, cursor, limit, self._boot)

    def close(self) -> None:
        """Nothing is held open between calls."""

    def locate(self, stream: Stream) -> str | None:
        """See ``Store.locate``."""
        directory = self._layout.agent_dir(stream)
        if directory is None or self._unpublished.hides(stream.session_id):
            return None
        return f"{directory}/{self._framing.log_name}"

    def read_raw(self, stream: Stream) -> bytes:
        """See ``Store.read_raw``."""
        with io_errors(self._directory(stream)), self._open(stream, repaired=False) as source:
            return source.read(0, source.size)

    def read_document(self, session_id: str) -> Document | None:
        """See ``Store.read_document``."""
        check_not_removed(self._layout, session_id)
        found = self._documents.read(session_id)
        return None if found is None or self._unpublished.hides(session_id) else found

    def list_documents(self) -> list[Document]:
        """See ``Store.list_documents``."""
        return self._unpublished.seen(self._documents.list, lambda document: document.session_id)

    def read_blob(self, digest: str) -> bytes:
        """See ``Store.read_blob``."""
        return self._blobs.read(digest)


def _written(log: StreamLog | None) -> tuple[int | None, int | None, int]:
    """How far a loaded log is written: size, next seq, epoch."""
    if log is None or not log.born:
        return None, None, 0
    with log.lock:
        if log.poisoned is not None:
            return log.synced, log.durable_seq, log.epoch
        return log.size, log.next_seq, log.epoch


def _known(log: StreamLog) -> KnownLog | None:
    """What the writing process knows of a log that has come to be."""
    with log.lock:
        if not log.born or log.removed or log.poisoned is not None:
            return None
        granted = EpochRow(log.epoch, log.next_seq, log.nonce, "", "")
        return KnownLog(log.header, log.next_seq, granted, log.closed, log.turn_from, log.size)


def jsonl_reader(fs: Fs, home: str, identity: StoreIdentity) -> JsonlReader:
    """The reader of a JSONL home that this process does not write."""
    layout = Layout(fs, home)
    directories = Directories(fs, home, durable=False)
    documents = Documents(fs, layout, directories, durable=False)
    blobs = Blobs(fs, layout, directories, durable=False)
    unpublished = unpublished_in(layout, documents.exists)
    return JsonlReader(fs, layout, documents, blobs, boot_id(), identity, unpublished)
