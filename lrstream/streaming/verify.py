"""Holding fetched payload against its checksums, before anything is decoded.

A range that was changed on its way is read once more, over a connection and a signed URL of its own: what
was wrong for a moment is right then. What is wrong twice is damaged where it lies, and nobody gets it.
"""

from __future__ import annotations

import logging
import zlib
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lrstream.errors import CheckFailedError, PayloadError, UsageError
from lrstream.layout.layout import DatasetLayout
from lrstream.mp4.span import Span
from lrstream.sidecar.checksum_file import ChecksumFile
from lrstream.sidecar.checksum_find import find_checksums
from lrstream.sidecar.checksum_wanted import coverage_of
from lrstream.sidecar.resolve import ResolvedSidecar
from lrstream.storage.byte_source import ByteSource
from lrstream.storage.store import DatasetStore
from lrstream.streaming.metrics import LoaderMetrics

__all__ = ["PayloadChecksums", "PayloadReader", "check_payload_checksums", "open_payload_checksums"]

logger = logging.getLogger("lrstream.loader")

PayloadChecksums = Literal["auto", "require", "off"]
"""``auto``: payload is checked where checksums are there; ``require``: without them nothing starts."""

_MAKE = "Make them with `lrstream build --checksums`, which reads every video once; publish them for others."


def check_payload_checksums(value: object) -> None:
    """Refuse anything but a `PayloadChecksums`."""
    if value not in get_args(PayloadChecksums):
        raise UsageError(f"payload_checksums is {value!r}, expected 'auto', 'require' or 'off'.")


def open_payload_checksums(
    mode: PayloadChecksums,
    store: DatasetStore,
    layout: DatasetLayout,
    sidecar: ResolvedSidecar,
    positions: NDArray[np.int64],
) -> ChecksumFile | None:
    """The checksums that belong to a sidecar, as `mode` wants them; says once what they do not cover.

    Args:
        mode: How much they matter.
        store: The dataset.
        layout: Its metadata.
        sidecar: Its sidecar.
        positions: int64, positions of the selected episodes.

    Raises:
        CheckFailedError: They are required, and are absent or do not cover every selected episode.
    """
    if mode == "off":
        return None
    found = find_checksums(store, sidecar.path, sidecar.identity)
    if found.checksums is None:
        why = f" ({' '.join(found.reasons)})" if found.reasons else ""
        message = f"There are no payload checksums for {store.location}{why}"
        if mode == "require":
            raise CheckFailedError(f"{message}, but payload_checksums='require'.", hint=_MAKE)
        logger.info("%s: bytes that change on the way may pass unnoticed.", message)
        return None
    coverage = coverage_of(found.checksums, layout, positions)
    if coverage.first_missing is not None:
        episode, camera, path = coverage.first_missing
        message = (
            f"{coverage.num_missing} of the {coverage.num_spans} spans of this selection have no payload "
            f"checksum, the first is that of episode {episode}, camera {camera}, file {path}"
        )
        if mode == "require":
            raise CheckFailedError(
                f"{message}, but payload_checksums='require'.",
                hint=_MAKE,
                num_missing=coverage.num_missing,
                num_spans=coverage.num_spans,
            )
        logger.warning("%s; they are not checked. %s", message, _MAKE)
    return found.checksums


class PayloadReader:
    """Reads spans and checks them. Thread-safe; belongs to one process.

    Args:
        checksums: Where there are any.
        metrics: Where outcomes are counted.
        strict: Whether a span without a checksum is refused.
    """

    def __init__(self, checksums: ChecksumFile | None, metrics: LoaderMetrics, *, strict: bool) -> None:
        self._checksums = checksums
        self._metrics = metrics
        self._strict = strict

    def read(self, source: ByteSource, span: Span, *, episode_index: int, camera: str) -> bytes:
        """The bytes of a span.

        Raises:
            PayloadError: They are not those of which the checksum was made, or (strict) have none.
            TransferError, NotFoundError, AccessError: They cannot be read.
        """
        start, stop = span.start_byte, span.stop_byte
        payload = source.read(start, stop)
        place = f"Episode {episode_index}, camera {camera}, file {source.path}, bytes [{start}, {stop})"
        expected = self._expected(source.path, start, stop)
        if expected is None:
            if self._strict:
                raise PayloadError(
                    f"{place}: there is no checksum, but payload_checksums='require'.", hint=_MAKE
                )
            self._metrics.add_payload_check("unchecked")
            return payload
        first = zlib.crc32(payload)
        if first == expected:
            self._metrics.add_payload_check("correct")
            return payload
        del payload
        source.close()  # what is opened again may come another way
        payload = source.read(start, stop)
        second = zlib.crc32(payload)
        if second == expected:
            self._metrics.add_payload_check("healed")
            logger.warning(
                "%s arrived damaged (CRC-32 %08x, expected %08x); read again, it is right.",
                place,
                first,
                expected,
            )
            return payload
        self._metrics.add_payload_check("damaged")
        raise PayloadError(
            f"{place}: CRC-32 is {second:08x}, expected {expected:08x}; read twice"
            f"{'' if first == second else f' (the first time it was {first:08x})'}.",
            hint="The file is damaged where it is stored, or something in between changes it. Restore it; "
            "`lrstream validate DATASET --deep` lists all damaged spans, exclude_episodes leaves them out. "
            "If the file is right, `lrstream build DATASET --checksums --force` makes the checksums anew.",
            file_path=source.path,
            start_byte=start,
            stop_byte=stop,
            episode_index=episode_index,
            camera=camera,
            expected=expected,
            found=second,
        )

    def _expected(self, path: str, start: int, stop: int) -> int | None:
        if self._checksums is None:
            return None
        row = self._checksums.file(path)
        return None if row is None else row.find(start, stop)
