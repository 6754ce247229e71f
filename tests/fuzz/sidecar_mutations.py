"""Ways to damage a sidecar archive or a mapped index: raw bytes, members, arrays, manifest, columns."""

from __future__ import annotations

import io
import json
import random
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from lrstream.index.format import row_checksum

__all__ = ["ARCHIVE_MUTATIONS", "INDEX_MUTATIONS", "RAW_MUTATIONS"]

_NUMBERS = (
    0, 1, -1, 2, 7, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, -(2**63),
)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    None, True, False, "", "x", "0", "../../etc/passwd", "\ud800", "a" * 5000, [], {}, [[]], [0], {"a": 1},
    1.5, float("nan"), float("inf"), 10**30, -(10**30), *_NUMBERS,
)  # fmt: skip
_HEADERS = (
    "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
    "{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000,), }",
    "{'descr': '<i8', 'fortran_order': False, 'shape': (1099511627776, 16777216), }",
    "{'descr': '<i8', 'fortran_order': False, 'shape': (-1,), }",
    "{'descr': '<i8', 'fortran_order': True, 'shape': (), }",
    "{'descr': '<i4', 'fortran_order': False, 'shape': (20,), }",
    "{'descr': '>i8', 'fortran_order': False, 'shape': (9,), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (9,), }",
    "{'descr': [('a', '<i8')], 'fortran_order': False, 'shape': (9,), }",
    "{'descr': '|V72', 'fortran_order': False, 'shape': (1,), }",
    "{'descr': '<U18', 'fortran_order': False, 'shape': (1,), }",
    "{'descr': '<i8', 'fortran_order': False, 'shape': (9,), 'x': __import__('os').abort()}",
    "{}",
    "[" * 4000,
    "",
)


# Of raw bytes (archives and indexes) --------------------------------------------------------------------


def flip_bytes(rng: random.Random, data: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        damaged[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(damaged)


def flip_end(rng: random.Random, data: bytes) -> bytes:
    """In the last part, where both formats keep their directory."""
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 2, 4))):
        damaged[rng.randrange(max(0, len(data) - 700), len(data))] = rng.randrange(256)
    return bytes(damaged)


def overwrite_word(rng: random.Random, data: bytes) -> bytes:
    damaged = bytearray(data)
    width = rng.choice((2, 4, 8))
    at = rng.randrange(len(data) - 8)
    damaged[at : at + width] = (rng.choice(_NUMBERS) % 2 ** (8 * width)).to_bytes(width, "little")
    return bytes(damaged)


def truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.choice((rng.randrange(len(data)), len(data) - rng.randrange(1, 30)))]


def cut_out(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.choice((1, 8, rng.randrange(1, 500))) :]


def zeros(rng: random.Random, data: bytes) -> bytes:
    """A part that was never written, as after a power failure."""
    at, length = rng.randrange(len(data)), rng.choice((512, 4096))
    return data[:at] + bytes(len(data[at : at + length])) + data[at + length :]


def repeat_piece(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[: at + rng.randrange(1, 500)] + data[at:]


RAW_MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    flip_bytes, flip_end, overwrite_word, truncate, cut_out, zeros, repeat_piece,
)  # fmt: skip


# Of archives, with valid checksums ----------------------------------------------------------------------

Members = list[tuple[str, bytes]]


def _members(data: bytes) -> Members:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [(info.filename, archive.read(info)) for info in archive.infolist()]


def _archive(members: Members, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in members:
            with warnings.catch_warnings():  # about names that are there twice, which is meant
                warnings.simplefilter("ignore", UserWarning)
                archive.writestr(zipfile.ZipInfo(name), content, method)
    return buffer.getvalue()


def _npy(header: str, body: bytes, version: int = 1) -> bytes:
    text = header.encode() + b"\n"
    width = 2 if version == 1 else 4
    return b"\x93NUMPY" + bytes((version, 0)) + len(text).to_bytes(width, "little") + text + body


def edit_array(rng: random.Random, data: bytes) -> bytes:
    """Some values of an array."""
    members = _members(data)
    at = rng.choice([at for at, (name, _) in enumerate(members) if not name.startswith("manifest")])
    array = np.load(io.BytesIO(members[at][1])).copy()
    for _ in range(rng.choice((1, 2, 9))):
        place = rng.randrange(len(array))
        if array.dtype.kind == "f":
            array[place] = rng.choice((float("nan"), float("inf"), -1e300, 0.0, -5.0, 1e9))
        else:
            old = int(array[place])
            array[place] = rng.choice((*_NUMBERS, max(old - 1, 0), min(old + 1, 2**62)))
    buffer = io.BytesIO()
    np.save(buffer, array)
    members[at] = (members[at][0], buffer.getvalue())
    return _archive(members)


def reshape_array(rng: random.Random, data: bytes) -> bytes:
    """Another length, shape or type."""
    members = _members(data)
    at = rng.randrange(len(members))
    array = np.load(io.BytesIO(members[at][1]))
    flat = array.reshape(-1)
    other = rng.choice(
        (
            flat[: len(flat) // 2],
            np.concatenate([flat, flat]),
            flat.reshape(1, -1),
            flat[:0],
            flat.astype("<i4") if flat.dtype.kind != "S" else flat,
            flat.astype(">i8") if flat.dtype.kind != "S" else flat,
            flat.astype("<f4") if flat.dtype.kind != "S" else flat,
            np.array(0),
        )
    )
    buffer = io.BytesIO()
    np.save(buffer, other)
    members[at] = (members[at][0], buffer.getvalue())
    return _archive(members)


def foreign_header(rng: random.Random, data: bytes) -> bytes:
    members = _members(data)
    at = rng.randrange(len(members))
    name, content = members[at]
    body = content[-rng.choice((0, 8, 72, len(content))) or len(content) :]
    members[at] = (name, _npy(rng.choice(_HEADERS), body, rng.choice((1, 1, 2, 3))))
    return _archive(members)


def rearrange_members(rng: random.Random, data: bytes) -> bytes:
    """Members missing, twice, renamed or of another method of compression."""
    members = _members(data)
    at = rng.randrange(len(members))
    method = zipfile.ZIP_DEFLATED
    choice = rng.randrange(5)
    if choice == 0:
        del members[at]
    elif choice == 1:
        members.append(members[at])
    elif choice == 2:
        name = rng.choice(("x.npy", "../x.npy", "7/sample_pts.npy", members[at][0] + ".npy", "é.npy", ""))
        members[at] = (name, members[at][1])
    elif choice == 3:
        method = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    else:
        rng.shuffle(members)
    return _archive(members, method)


def bomb(rng: random.Random, data: bytes) -> bytes:
    """An array that takes some hundred kilobytes here and 96 MiB unpacked."""
    members = _members(data)
    at = rng.choice([at for at, (name, _) in enumerate(members) if not name.startswith("manifest")])
    count = 12 << 20
    header = rng.choice(
        (
            f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({count},), }}",
            f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({count},), }}",
            "{'descr': '<i8', 'fortran_order': False, 'shape': (9,), }",
        )
    )
    members[at] = (members[at][0], _npy(header, b"") + bytes(8 * count))
    return _archive(members)


def edit_manifest(rng: random.Random, data: bytes) -> bytes:
    """A value of the JSON replaced, removed or doubled."""
    members = _members(data)
    at = next(at for at, (name, _) in enumerate(members) if name.startswith("manifest"))
    document = json.loads(np.load(io.BytesIO(members[at][1])).item())
    for _ in range(rng.choice((1, 1, 3))):
        places = list(_places(document))
        holder, key = rng.choice(places)
        choice = rng.randrange(5)
        if choice == 0:
            del holder[key]
        elif choice == 1 and isinstance(holder, list):
            holder.append(holder[key])
        elif choice == 2 and type(holder[key]) is int:
            holder[key] += rng.choice((-1, 1, 2**32))
        elif choice == 3 and isinstance(holder[key], str):
            holder[key] = holder[key][: len(holder[key]) // 2] + rng.choice(("", "0", "zz", "é", "\0"))
        else:
            holder[key] = rng.choice(_VALUES)
        if not document:
            break
    text = json.dumps(document).encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        text = rng.choice(
            (b"[" * 100_000, text[:-3], text + b"]", b'{"version":3,"version":3}', b"\xff\xfe", b"")
        )
    buffer = io.BytesIO()
    np.save(buffer, np.array(text))
    members[at] = (members[at][0], buffer.getvalue())
    return _archive(members)


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


ARCHIVE_MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    *(edit_array,) * 6, *(reshape_array, foreign_header, rearrange_members) * 3, *(edit_manifest,) * 9, bomb,
)  # fmt: skip


# Of mapped indexes, written again by Arrow ----------------------------------------------------------------


def edit_column(rng: random.Random, data: bytes) -> bytes:
    """Cells replaced, valid for Arrow."""
    with pa.ipc.open_file(pa.BufferReader(data)) as reader:
        schema, table = reader.schema, reader.read_all()
    rows = table.to_pylist()
    for _ in range(rng.choice((1, 1, 2, 5))):
        row, name = rng.choice(rows), rng.choice(schema.names)
        row[name] = _other_cell(rng, schema.field(name).type, row[name])
        if rng.random() < 0.7:
            # As if it had been made so: then the checks behind the checksum have to notice.
            row["checksum"] = row_checksum(row)
    return _written(pa.Table.from_pylist(rows, schema=schema))


def _other_cell(rng: random.Random, kind: pa.DataType, old: Any) -> Any:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_boolean(kind):
        return not old
    if pa.types.is_integer(kind):
        bits = kind.bit_width
        low, high = (0, 2**bits - 1) if "uint" in str(kind) else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        return min(max(rng.choice((*_NUMBERS, old + 1, old - 1, 2**40, 2**28)), low), high)
    if pa.types.is_floating(kind):
        return rng.choice((0.0, -1.0, float("nan"), float("inf"), 1e300))
    if pa.types.is_string(kind):
        return rng.choice(("", "x", "zzz", (old or "") + "x"))
    content = bytes(old or b"")
    return rng.choice((b"", content[:-1], content + b"\0", content[::-1], rng.randbytes(len(content))))


def rearrange_rows(rng: random.Random, data: bytes) -> bytes:
    """Rows missing, twice or in another order, or a column less."""
    with pa.ipc.open_file(pa.BufferReader(data)) as reader:
        table = reader.read_all()
    places = list(range(len(table)))
    choice = rng.randrange(4)
    if choice == 0:
        places.pop(rng.randrange(len(places)))
    elif choice == 1:
        places.append(rng.choice(places))
    elif choice == 2:
        rng.shuffle(places)
    else:
        return _written(table.drop_columns([rng.choice(table.column_names)]))
    return _written(table.take(places))


def edit_metadata(rng: random.Random, data: bytes) -> bytes:
    with pa.ipc.open_file(pa.BufferReader(data)) as reader:
        table = reader.read_all()
    metadata = dict(table.schema.metadata)
    key = rng.choice(list(metadata))
    choice = rng.choice((b"", b"0", b"-1", b"99999999999999999999", b"x", b"\xff\xfe", None))
    if choice is None:
        del metadata[key]
    else:
        metadata[key] = choice
    return _written(table.replace_schema_metadata(metadata))


def _written(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


INDEX_MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    edit_column, edit_column, rearrange_rows, edit_metadata,
)  # fmt: skip
