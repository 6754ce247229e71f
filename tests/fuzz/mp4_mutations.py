"""Ways to damage an MP4: bytes, cuts, box sizes and types, tables, structure."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

from tests.support.media import Node, assemble, parse, walk

__all__ = ["MUTATIONS", "mutate"]

_WORDS = (
    0, 1, 2, 7, 8, 9, 15, 16, 0xFF, 0x100, 0xFFFF, 0x10000, 0xFF_FFFF, 0x0FFF_FFFF, 0x1555_5555,
    0x2000_0000, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFF8, 0xFFFF_FFFE, 0xFFFF_FFFF,
)  # fmt: skip
_KINDS = (
    b"ftyp", b"moov", b"mdat", b"free", b"skip", b"uuid", b"mvhd", b"trak", b"tkhd", b"edts", b"elst",
    b"mdia", b"mdhd", b"hdlr", b"minf", b"vmhd", b"dinf", b"dref", b"stbl", b"stsd", b"stts", b"ctts",
    b"stss", b"stsc", b"stsz", b"stz2", b"stco", b"co64", b"mvex", b"trex", b"moof", b"traf", b"sidx",
    b"sinf", b"encv", b"avc1", b"hvc1", b"av01", b"vp09", b"mp4v", b"colr", b"pasp", b"meta", b"udta",
    b"wide", b"\0\0\0\0", b"\xff\xff\xff\xff",
)  # fmt: skip
_TABLES = (b"stts", b"ctts", b"stsc", b"stsz", b"stz2", b"stco", b"co64", b"stss", b"elst")


def _word(rng: random.Random, data: bytes) -> int:
    near = (len(data), len(data) - 1, len(data) + 1, rng.getrandbits(32), rng.getrandbits(12))
    return rng.choice(_WORDS + near) & 0xFFFF_FFFF


def _nodes(data: bytes) -> list[Node]:
    return list(walk(parse(data)))


def _tables_region(data: bytes) -> tuple[int, int]:
    for node in parse(data):
        if node.kind == b"moov":
            return node.position - 8, node.position - 8 + len(node.to_bytes())
    return 0, len(data)


# Of bytes ---------------------------------------------------------------------------------------------


def flip_bytes(rng: random.Random, data: bytes) -> bytes:
    start, stop = _tables_region(data) if rng.random() < 0.8 else (0, len(data))
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        damaged[rng.randrange(start, stop)] = rng.randrange(256)
    return bytes(damaged)


def overwrite_word(rng: random.Random, data: bytes) -> bytes:
    start, stop = _tables_region(data)
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(start, stop - 8)
        if rng.random() < 0.2:
            damaged[at : at + 8] = struct.pack(">Q", rng.choice((_word(rng, data), rng.getrandbits(64))))
        else:
            damaged[at : at + 4] = struct.pack(">I", _word(rng, data))
    return bytes(damaged)


def truncate(rng: random.Random, data: bytes) -> bytes:
    start, stop = _tables_region(data)
    return data[: rng.choice((rng.randrange(len(data)), rng.randrange(start, stop), rng.randrange(64)))]


def cut_out(rng: random.Random, data: bytes) -> bytes:
    at, length = rng.randrange(len(data)), rng.choice((1, 4, 8, rng.randrange(1, 400)))
    return data[:at] + data[at + length :]


def repeat_piece(rng: random.Random, data: bytes) -> bytes:
    at, length = rng.randrange(len(data)), rng.randrange(1, 2000)
    return data[: at + length] + data[at:]


def insert_noise(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + rng.randbytes(rng.choice((1, 8, rng.randrange(1, 300)))) + data[at:]


# Of box headers ---------------------------------------------------------------------------------------


def edit_box_size(rng: random.Random, data: bytes) -> bytes:
    node = rng.choice([node for node in _nodes(data) if node.size_form == "compact"])
    at = node.position - 8
    (size,) = struct.unpack_from(">I", data, at)
    new = rng.choice((_word(rng, data), size + rng.randrange(-16, 17), size * 2)) & 0xFFFF_FFFF
    return data[:at] + struct.pack(">I", new) + data[at + 4 :]


def edit_box_type(rng: random.Random, data: bytes) -> bytes:
    node = rng.choice([node for node in _nodes(data) if node.size_form == "compact"])
    at = node.position - 4
    kind = rng.choice((*_KINDS, rng.randbytes(4)))
    return data[:at] + kind + data[at + 4 :]


def large_size_form(rng: random.Random, data: bytes) -> bytes:
    """Size 1 and 64 bits of it, in the place of the payload's first bytes."""
    node = rng.choice([node for node in _nodes(data) if node.size_form == "compact"])
    at = node.position - 8
    size = rng.choice((0, 15, 16, 1 << 32, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, len(data)))
    return (
        data[:at] + struct.pack(">I", 1) + data[at + 4 : at + 8] + struct.pack(">Q", size) + data[at + 16 :]
    )


# Of tables --------------------------------------------------------------------------------------------


def edit_table(rng: random.Random, data: bytes) -> bytes:
    """A count or some entries of a table."""
    tables = [node for node in _nodes(data) if node.kind in _TABLES and len(node.payload) >= 12]
    if not tables:
        return flip_bytes(rng, data)
    damaged = bytearray(data)
    node = rng.choice(tables)
    places = [4] if rng.random() < 0.3 else []
    places += [4 * rng.randrange(len(node.payload) // 4) for _ in range(rng.choice((1, 2, 5)))]
    for place in places:
        (old,) = struct.unpack_from(">I", node.payload, place)
        new = rng.choice((_word(rng, data), old + 1, old - 1, old * 2, old ^ (1 << rng.randrange(32))))
        damaged[node.position + place : node.position + place + 4] = struct.pack(">I", new & 0xFFFF_FFFF)
    return bytes(damaged)


def uniform_sizes(rng: random.Random, data: bytes) -> bytes:
    """Any number of samples of one size, in twelve bytes; with a matching table of durations or not."""
    nodes = parse(data)
    for node in walk(nodes):
        count = rng.choice((*_WORDS, rng.randrange(1, 100)))
        if node.kind in (b"stsz", b"stz2"):
            node.kind = b"stsz"
            node.payload = struct.pack(">III", 0, rng.choice((1, 2, 100, 0xFFFF_FFFF)), count)
        elif node.kind == b"stts" and rng.random() < 0.8:
            node.payload = struct.pack(">IIII", 0, 1, count, rng.choice((0, 1, 512, 0xFFFF_FFFF)))
        elif node.kind == b"ctts" and rng.random() < 0.8:
            node.payload = struct.pack(">IIII", 0, 1, count, rng.choice((0, 1, 512, 0x8000_0000)))
        elif node.kind == b"stsc" and rng.random() < 0.8:
            node.payload = struct.pack(">IIIII", 0, 1, 1, count, 1)
    return assemble(nodes)


def edit_list(rng: random.Random, data: bytes) -> bytes:
    """An edit list of any number of edits."""
    nodes = parse(data)
    for node in walk(nodes):
        if node.kind == b"trak":
            wide = rng.random() < 0.3
            rows = [
                struct.pack(
                    ">QqI" if wide else ">IiI",
                    rng.choice((0, 1, 1000, 0xFFFF_FFFF)),
                    rng.choice((-1, 0, 1, 512, 2**31 - 1, -(2**31))),
                    rng.choice((0x10000, 0, 0x8000, 0xFFFF_0000)),
                )
                for _ in range(rng.choice((0, 1, 1, 2, 3, 50)))
            ]
            count = len(rows) if rng.random() < 0.8 else _word(rng, data)
            elst = Node(b"elst", struct.pack(">II", int(wide) << 24, count) + b"".join(rows))
            node.children.insert(rng.randrange(len(node.children) + 1), Node(b"edts", children=[elst]))
    return assemble(nodes)


# Of structure -----------------------------------------------------------------------------------------


def drop_box(rng: random.Random, data: bytes) -> bytes:
    nodes = parse(data)
    parents = [nodes, *(node.children for node in walk(nodes) if node.children)]
    siblings = rng.choice(parents)
    siblings.pop(rng.randrange(len(siblings)))
    return b"".join(node.to_bytes() for node in nodes)


def move_box(rng: random.Random, data: bytes) -> bytes:
    """A box, or a copy of it, in another place; also a container inside another."""
    nodes = parse(data)
    parents = [nodes, *(node.children for node in walk(nodes) if node.children)]
    node = rng.choice([node for node in walk(nodes) if node.kind != b"mdat"])
    moved = parse(node.to_bytes())
    if rng.random() < 0.5:
        source = next(siblings for siblings in parents if any(found is node for found in siblings))
        source[:] = [found for found in source if found is not node]
    target = rng.choice(parents)
    for _ in range(rng.choice((1, 1, 2, 200))):
        target.insert(rng.randrange(len(target) + 1), moved[0])
    return b"".join(node.to_bytes() for node in nodes)


def nest(rng: random.Random, data: bytes) -> bytes:
    """Containers in containers around nothing, noise or a copy of a box."""
    nodes = parse(data)
    parents = [nodes, *(node.children for node in walk(nodes) if node.children)]
    inner = rng.choice(
        (b"", rng.randbytes(rng.randrange(40)), rng.choice(list(walk(nodes))).to_bytes()[:5000])
    )
    kinds = rng.choice(((b"moov",), (b"trak", b"mdia"), (b"stbl",), (b"meta", b"udta"), (b"edts",)))
    body = inner
    for depth in range(rng.choice((1, 3, 30, 300, 3000))):
        body = struct.pack(">I4s", len(body) + 8, kinds[depth % len(kinds)]) + body
    target = rng.choice(parents)
    target.insert(rng.randrange(len(target) + 1), Node(rng.choice(_KINDS), body))
    return b"".join(node.to_bytes() for node in nodes)


def replace_payload(rng: random.Random, data: bytes) -> bytes:
    """A box of any other content: noise, empty, longer, or of another version."""
    nodes = parse(data)
    node = rng.choice([node for node in walk(nodes) if not node.children and node.kind != b"mdat"])
    payload = bytearray(node.payload)
    choice = rng.randrange(4)
    if choice == 0:
        payload = bytearray(rng.randbytes(rng.choice((0, 1, 4, 8, 24, 200))))
    elif choice == 1:
        payload = payload[: rng.randrange(len(payload) + 1)]
    elif choice == 2:
        payload += rng.randbytes(rng.randrange(1, 64))
    elif payload:
        payload[0] = rng.choice((0, 1, 2, 127, 255))
    node.payload = bytes(payload)
    if node.kind in (b"stco", b"co64"):  # no offsets any more that could be moved along
        return b"".join(node.to_bytes() for node in nodes)
    return assemble(nodes)


MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    flip_bytes, overwrite_word, truncate, cut_out, repeat_piece, insert_noise, edit_box_size, edit_box_type,
    large_size_form, edit_table, uniform_sizes, edit_list, drop_box, move_box, nest, replace_payload,
)  # fmt: skip


def mutate(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    """One mutation, now and then several; returns their names and the result."""
    first = rng.choice(MUTATIONS)
    names, damaged = [first.__name__], first(rng, data)
    while rng.random() < 0.25 and len(damaged) > 64:
        another = rng.choice((cut_out, insert_noise, repeat_piece))
        names.append(another.__name__)
        damaged = another(rng, damaged)
    return "+".join(names), damaged
