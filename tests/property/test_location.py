"""Locations: what is written comes back, and no text crashes the parser."""

from __future__ import annotations

import contextlib
from urllib.parse import quote

from hypothesis import given
from hypothesis import strategies as st

from lrstream.errors import NotFoundError, UsageError
from lrstream.storage.location import Location, parse_location

PREFIXES = ["", "hf://", "hf://datasets/", "s3://", "file://", "https://", "~"]
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,10}", fullmatch=True)
PATHS = st.lists(st.from_regex(r"[A-Za-z0-9_@=-]{1,6}", fullmatch=True), max_size=3).map("/".join)
REVISIONS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._/%-]{0,10}", fullmatch=True)


@given(NAMES, NAMES, REVISIONS, PATHS)
def test_hub_urls_round_trip(owner: str, name: str, revision: str, path: str) -> None:
    url = f"hf://datasets/{owner}/{name}@{quote(revision, safe='')}" + (f"/{path}" if path else "")
    location = parse_location(url)
    assert location == Location("hub", url, f"{owner}/{name}", path, revision)
    assert parse_location(location.root) == location


@given(NAMES, NAMES, PATHS)
def test_bucket_urls_round_trip(owner: str, name: str, path: str) -> None:
    url = f"hf://buckets/{owner}/{name}" + (f"/{path}" if path else "")
    assert parse_location(url) == Location("bucket", url, f"{owner}/{name}", path)


@given(st.text(max_size=40), st.sampled_from(PREFIXES))
def test_any_text_is_a_location_or_refused(text: str, prefix: str) -> None:
    # Any other exception fails the test.
    with contextlib.suppress(UsageError, NotFoundError):
        location = parse_location(prefix + text)
        assert location.root
        assert location.root == "/" or not location.root.endswith("/")
