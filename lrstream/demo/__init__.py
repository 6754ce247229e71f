"""Small datasets made from scratch, in which every picture says which frame it is.

For trying lrstream without a robot or a download, for ``lrstream benchmark loader --demo``, and for
tests: a reader that pairs a row with another row's picture is found out by `read_identity`.
"""

from __future__ import annotations

from lrstream.demo.features import EXTRA_KEYS
from lrstream.demo.pictures import (
    DEPTH_CODE_MAX,
    Painter,
    depth_codes,
    read_identities,
    read_identity,
)
from lrstream.demo.spec import Codec, DemoCamera, DemoSpec, DepthEncoding, Extra, WrittenDataset
from lrstream.demo.writer import write_dataset

__all__ = [
    "DEPTH_CODE_MAX",
    "EXTRA_KEYS",
    "Codec",
    "DemoCamera",
    "DemoSpec",
    "DepthEncoding",
    "Extra",
    "Painter",
    "WrittenDataset",
    "depth_codes",
    "read_identities",
    "read_identity",
    "write_dataset",
]
