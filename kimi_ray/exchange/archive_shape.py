"""Whether every reader of a zip file sees the same in it.

Some go from entry to entry, others begin at the directory at its end: both must lead to the same files.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from typing import IO

_LOCAL = struct.Struct("<4s5H3I2H")
_DESCRIBED = 0x08
_UTF8 = 0x800
_ZIP64_EXTRA = 1
_FAR = 0xFFFFFFFF
_END = 22


def shape_problems(archive: zipfile.ZipFile) -> Iterator[str]:
    """What is wrong with the frame around the files; nothing for what any program that makes zip files writes.

    Raises:
        OSError: It cannot be read.
    """
    file = archive.fp
    assert file is not None
    end = 0
    for info in sorted(archive.infolist(), key=lambda one: one.header_offset):
        if info.header_offset != end:
            yield f"there is something else in front of {info.filename}"
        behind = _behind(file, info)
        if behind is None:
            yield f"{info.filename} is another one in its place than in the directory"
            return
        end = behind
    if end != archive.start_dir:
        yield "there is something else behind the last file"
    yield from _end_problems(archive, file)


def _behind(file: IO[bytes], info: zipfile.ZipInfo) -> int | None:
    """Where an entry ends, if its own header and what follows its data say what the directory says."""
    file.seek(info.header_offset)
    head = file.read(_LOCAL.size)
    if len(head) < _LOCAL.size:
        return None
    magic, version, flags, method, _, _, crc, packed, size, name_bytes, extra_bytes = _LOCAL.unpack(head)
    name, extra = file.read(name_bytes), file.read(extra_bytes)
    described = bool(flags & _DESCRIBED)
    same = (
        magic == b"PK\x03\x04"
        and version == info.extract_version
        and flags == info.flag_bits
        and method == info.compress_type
        and name == info.orig_filename.encode("utf-8" if flags & _UTF8 else "cp437", "replace")
    )
    if not same:
        return None
    wide = packed == size == _FAR
    if wide:
        if len(extra) < 20 or struct.unpack("<2H", extra[:4]) != (_ZIP64_EXTRA, 16):
            return None
        size, packed = struct.unpack("<2Q", extra[4:20])
    told = (crc, size, packed)
    wanted = (info.CRC, info.file_size, info.compress_size)
    if told != wanted and not (described and told == (0, 0, 0)):
        return None
    file.seek(info.compress_size, 1)
    if described:
        form = "<4sI2Q" if wide else "<4s3I"
        data = file.read(struct.calcsize(form))
        if len(data) < struct.calcsize(form):
            return None
        if struct.unpack(form, data) != (b"PK\x07\x08", info.CRC, info.compress_size, info.file_size):
            return None
    return file.tell()


def _end_problems(archive: zipfile.ZipFile, file: IO[bytes]) -> Iterator[str]:
    length = file.seek(0, 2)
    file.seek(max(0, length - _END))
    found = file.read(_END)
    if len(found) < _END or found[:4] != b"PK\x05\x06" or found[-2:] != b"\0\0":
        yield "there is something else behind the directory of files"
        return
    disk, first_disk, here, count, size, offset = struct.unpack("<4H2I", found[4:-2])
    if _FAR in (size, offset) or 0xFFFF in (here, count):
        return  # a large one: a record in front of this one says it
    entries = len(archive.infolist())
    wanted = (0, 0, entries, entries, length - _END - archive.start_dir, archive.start_dir)
    if (disk, first_disk, here, count, size, offset) != wanted:
        yield "the directory of files is not where its end says"
