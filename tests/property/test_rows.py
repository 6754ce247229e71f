"""Rows against a plain loop over all rows, for any split into row groups and any order of rows."""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from lrstream.layout.layout import load_layout
from lrstream.layout.rows import EpisodeRowReader
from lrstream.storage.location import parse_location
from lrstream.storage.store import open_store
from tests.support.tables import TableDataset


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=6),
    st.integers(1, 12),
    st.booleans(),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_rows_equal_a_plain_loop(
    lengths: list[int], row_group_size: int, statistics: bool, random: Random, shuffled: bool
) -> None:
    dataset = TableDataset(lengths, cameras=())
    values = [random.getrandbits(40) for _ in range(sum(lengths))]
    dataset.add_rows("x", {"dtype": "int64", "shape": [1], "names": None}, values, pa.int64())
    if shuffled:
        order = list(range(sum(lengths)))
        random.shuffle(order)
        dataset.rows[0] = {name: [column[row] for row in order] for name, column in dataset.rows[0].items()}
    with tempfile.TemporaryDirectory() as directory:
        root = dataset.write(Path(directory), row_group_size=row_group_size, statistics=statistics)
        store = open_store(parse_location(root))
        reader = EpisodeRowReader(store, load_layout(store))
        for episode in range(len(lengths)):
            table = dataset.rows[0]
            expected = sorted(
                (index, frame, x)
                for index, frame, x, of in zip(
                    table["index"], table["frame_index"], table["x"], table["episode_index"], strict=True
                )
                if of == episode
            )
            rows = reader.read(episode).arrays
            read = zip(*(rows[name].tolist() for name in ("index", "frame_index", "x")), strict=True)
            assert list(read) == expected
        reader.close()
