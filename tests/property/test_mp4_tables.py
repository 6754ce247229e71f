"""Random sample tables come out as a plain loop expands them, and survive a mini-MP4 (MP-1, MP-6)."""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lrstream.mp4.boxes import Box
from lrstream.mp4.movie import read_movie
from lrstream.mp4.span import Span
from lrstream.mp4.synthesis import mini_mp4, mini_mp4_size, mini_mp4_time_offset_s
from tests.support.media import Node, find, index, parse, table, to_co64, to_stz2, with_moov_last

TIMESCALE = 1000
DELTA = 40


@dataclass
class Movie:
    """A made-up track: what a plain reading gives, and a file that says the same in boxes."""

    sizes: list[int]
    durations: list[int]
    offsets_ticks: list[int]
    sync: list[int]
    positions: list[int]
    data: bytes


def _run_lengths(values: list[int], merge: bool) -> list[tuple[int, int]]:
    """Pairs (count, value); without merging, a run for every sample."""
    if not merge:
        return [(1, value) for value in values]
    return [(len(list(group)), value) for value, group in itertools.groupby(values)]


@st.composite
def movies(draw: st.DrawFn) -> Movie:
    count = draw(st.integers(1, 40))
    constant = draw(st.booleans())
    sizes = [draw(st.integers(1, 15))] * count if constant else draw(_lists(st.integers(1, 15), count))
    durations = draw(_lists(st.sampled_from([DELTA, DELTA, DELTA, 3 * DELTA]), count))
    # Offsets below a duration keep all times apart; larger multiples are made by reordering.
    signed = draw(st.booleans())
    small = draw(_lists(st.integers(-19 if signed else 0, 20), count))
    offsets = [0] * count if draw(st.booleans()) else small
    if draw(st.booleans()) and count >= 3:  # a picture presented two later than decoded, as before B-frames
        durations = [DELTA] * count
        offsets = [3 * DELTA if number % 3 == 0 else 0 for number in range(count)]
        if (count - 1) % 3 == 0:
            offsets[-1] = 5 * DELTA
        offsets = [each - (DELTA if signed else 0) for each in offsets]
        ticks = [DELTA * number + offset for number, offset in enumerate(offsets)]
        if len(set(ticks)) < count:  # times collide: shift every other one by a tick
            offsets = [each + number % 3 for number, each in enumerate(offsets)]
    sync = sorted({0} | draw(st.sets(st.integers(0, count - 1))))

    # Chunks of random lengths with random gaps, some of them out of order in the file.
    lengths: list[int] = []
    while sum(lengths) < count:
        lengths.append(min(draw(st.integers(1, 7)), count - sum(lengths)))
    place = draw(st.permutations(range(len(lengths))))
    starts, at = [0] * len(lengths), 0
    bounds = [0, *itertools.accumulate(lengths)]
    for chunk in place:
        at += draw(st.integers(0, 9))
        starts[chunk] = at
        at += sum(sizes[bounds[chunk] : bounds[chunk + 1]])
    payload = bytes(number % 251 for number in range(at + 3))

    merge = draw(st.booleans())
    runs: list[tuple[int, int, int]] = []
    for number, length in enumerate(lengths, start=1):
        if not (merge and runs and runs[-1][1] == length):
            runs.append((number, length, 1))

    ftyp = Node(b"ftyp", b"isom\0\0\0\0")
    stbl = Node(
        b"stbl",
        children=[
            Node(b"stsd", struct.pack(">II", 0, 1) + Node(b"avc1", bytes(78)).to_bytes()),
            Node(b"stts", table(0, list(_run_lengths(durations, merge)), "II")),
            Node(b"ctts", table(1, list(_run_lengths(offsets, merge)), "Ii")),
            Node(b"stss", table(0, [(number + 1,) for number in sync], "I")),
            Node(b"stsc", table(0, list(runs), "III")),
            Node(b"stsz", struct.pack(f">III{count}I", 0, 0, count, *sizes)),
            Node(b"stco", table(0, [(start,) for start in starts], "I")),
        ],
    )
    if constant and draw(st.booleans()):
        stbl.child(b"stsz").payload = struct.pack(">III", 0, sizes[0], count)
    header = struct.pack(">IIIII", 0, 0, 0, TIMESCALE, sum(durations)) + bytes(80)
    mdia = Node(
        b"mdia",
        children=[
            Node(b"mdhd", header[:24]),
            Node(b"hdlr", bytes(8) + b"vide" + bytes(13)),
            Node(b"minf", children=[stbl]),
        ],
    )
    trak = Node(b"trak", children=[Node(b"tkhd", bytes(76) + struct.pack(">II", 64 << 16, 48 << 16)), mdia])
    nodes = [ftyp, Node(b"moov", children=[Node(b"mvhd", header), trak]), Node(b"mdat", payload)]
    variant = draw(st.sampled_from(["plain", "co64", "stz2", "last"]))
    if variant == "co64":
        to_co64(nodes)
    elif variant == "stz2" and stbl.child(b"stsz").payload[4:8] == bytes(4):
        to_stz2(nodes, draw(st.sampled_from([4, 8, 16])))
    elif variant == "last":
        with_moov_last(nodes)
    base = 8 + sum(
        len(node.to_bytes()) for node in itertools.takewhile(lambda each: each.kind != b"mdat", nodes)
    )
    chunk_box = next(box for box in stbl.children if box.kind in (b"stco", b"co64"))
    width = "Q" if chunk_box.kind == b"co64" else "I"
    chunk_box.payload = table(0, [(base + start,) for start in starts], width)

    positions = []
    for chunk, start in enumerate(starts):
        at = base + start
        for number in range(bounds[chunk], bounds[chunk + 1]):
            positions.append(at)
            at += sizes[number]
    data = b"".join(node.to_bytes() for node in nodes)
    return Movie(sizes, durations, offsets, sync, positions, data)


def _lists(items: st.SearchStrategy[int], count: int) -> st.SearchStrategy[list[int]]:
    return st.lists(items, min_size=count, max_size=count)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(movies())
def test_tables_expand_as_a_loop_does(movie: Movie) -> None:
    samples = index(movie.data).samples
    assert samples.sizes_bytes.tolist() == movie.sizes
    assert samples.durations_ticks.tolist() == movie.durations
    assert samples.composition_offsets_ticks.tolist() == movie.offsets_ticks
    assert samples.sync_samples.tolist() == movie.sync
    assert samples.offsets_bytes.tolist() == movie.positions
    decoded = 0
    for number, duration in enumerate(movie.durations):
        assert samples.pts_s[number] == (decoded + movie.offsets_ticks[number]) / TIMESCALE
        decoded += duration


@settings(max_examples=200, deadline=None, derandomize=True)
@given(movies())
def test_the_bounds_of_all_samples_are_those_of_each(movie: Movie) -> None:
    moov = find(parse(movie.data), b"moov").to_bytes()
    track = read_movie(Box("clip.mp4", "moov", 0, 8, memoryview(moov)[8:]), len(movie.data))
    ends = [at + size for at, size in zip(movie.positions, movie.sizes, strict=True)]
    assert (track.first_byte, track.stop_byte) == (min(movie.positions), max(ends))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(movies(), st.data())
def test_any_part_survives_a_mini_mp4(movie: Movie, choose: st.DataObject) -> None:
    track = index(movie.data)
    first = choose.draw(st.sampled_from(movie.sync))
    stop = choose.draw(st.integers(first + 1, len(movie.sizes)))
    inside = range(first, stop)
    span = Span(
        first,
        stop,
        min(movie.positions[n] for n in inside),
        max(movie.positions[n] + movie.sizes[n] for n in inside),
    )
    payload = movie.data[span.start_byte : span.stop_byte]
    mini = mini_mp4(track, span, payload)
    assert len(mini) == mini_mp4_size(track, span)
    again = index(mini).samples
    assert again.sizes_bytes.tolist() == movie.sizes[first:stop]
    assert again.durations_ticks.tolist() == movie.durations[first:stop]
    assert again.sync_samples.tolist() == [n - first for n in movie.sync if first <= n < stop]
    pictures = [mini[at : at + size] for at, size in zip(again.offsets_bytes, again.sizes_bytes, strict=True)]
    assert pictures == [movie.data[movie.positions[n] : movie.positions[n] + movie.sizes[n]] for n in inside]
    np.testing.assert_allclose(
        again.pts_s + mini_mp4_time_offset_s(track, span), track.samples.pts_s[first:stop], atol=1e-9
    )
    assert again.pts_s.min() >= 0
