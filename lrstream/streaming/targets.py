"""Where the decoded pictures of a camera go: each into the rows of all samples that show it."""

from __future__ import annotations

from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from lrstream.errors import DecodeError
from lrstream.streaming.pictures import PictureConverter

__all__ = ["CameraTarget"]


class CameraTarget:
    """Takes the pictures of one camera for some samples of one episode.

    A picture is converted once, however many samples and places of their windows show it.

    Args:
        ranks: For each sample the presentation ranks of its pictures.
        table: Depth of each code, or None for RGB.
        places: For each sample where its pictures may be written, a C-contiguous array ``(3, H, W)``, or
            ``(T, 3, H, W)`` if there are several; None = anywhere. One that does not fit is not used.
    """

    def __init__(
        self,
        ranks: list[list[int]],
        table: NDArray[np.float32] | None,
        places: list[NDArray[Any] | None],
    ) -> None:
        self._table = table
        self._places = places
        self._arrays: list[NDArray[Any]] | None = None
        self._lengths = [len(of_sample) for of_sample in ranks]
        self._users: list[list[tuple[int, int]]] = []
        self.ranks: list[int]
        """The pictures to be decoded; the target counts them by their place in this list."""
        if len(ranks) == 1 and len(set(ranks[0])) == len(ranks[0]):
            # The usual case: each picture has one place, in the order in which they are asked for.
            self.ranks = ranks[0]
            return
        users: dict[int, list[tuple[int, int]]] = {}
        for sample, of_sample in enumerate(ranks):
            for place, rank in enumerate(of_sample):
                users.setdefault(rank, []).append((sample, place))
        self.ranks = list(users)
        self._users = list(users.values())

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """For each sample uint8 ``(3, H, W)`` or float32 ``(1, H, W)``, with ``T`` in front for several."""
        if self._arrays is None:
            raise DecodeError("No picture was decoded.")
        return self._arrays

    def __call__(self, position: int, picture: av.VideoFrame, converter: PictureConverter) -> None:
        """Take the picture of ``ranks[position]``; see `PictureSink`."""
        if self._arrays is None:
            self._arrays = self._allocate(picture.height, picture.width)
        if not self._users:
            out = self._arrays[0]
            self._write(picture, converter, out if self._lengths[0] == 1 else out[position])
            return
        first: NDArray[Any] | None = None
        for sample, place in self._users[position]:
            out = self._arrays[sample]
            if self._lengths[sample] > 1:
                out = out[place]
            if first is None:
                first = out
                self._write(picture, converter, out)
            else:
                np.copyto(out, first)

    def _write(self, picture: av.VideoFrame, converter: PictureConverter, out: NDArray[Any]) -> None:
        if self._table is None:
            converter.write_rgb(picture, out)
        else:
            converter.write_depth(picture, self._table, out)

    def _allocate(self, height: int, width: int) -> list[NDArray[Any]]:
        size: tuple[int, ...]
        size, dtype = (
            ((3, height, width), np.uint8) if self._table is None else ((1, height, width), np.float32)
        )
        arrays: list[NDArray[Any]] = []
        for length, place in zip(self._lengths, self._places, strict=True):
            shape = size if length == 1 else (length, *size)
            if place is not None and place.shape == shape and place.dtype == dtype:
                arrays.append(place)
            else:
                arrays.append(np.empty(shape, dtype=dtype))
        return arrays
