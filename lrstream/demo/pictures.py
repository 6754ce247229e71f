"""Pictures that say which they are: painted identities, moving backgrounds, known depth codes.

A wrong picture beside the right row is the fault that matters most in a loader, and no exception
shows it. So every RGB picture carries its camera, episode and frame as 24 blocks of 8 x 8 pixels,
12 in a row from the top left, least significant bit first, bright for 1: 4 bits camera, 8 bits
episode, 12 bits frame. Such blocks survive lossy coding and scaling of the colours.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lrstream.errors import UsageError

__all__ = [
    "DEPTH_CODE_MAX",
    "IDENTITY_HEIGHT",
    "IDENTITY_WIDTH",
    "Painter",
    "depth_codes",
    "read_identities",
    "read_identity",
]

_BLOCK = 8
_COLUMNS = 12
_ROWS = 2
_BITS = _ROWS * _COLUMNS
IDENTITY_HEIGHT = _ROWS * _BLOCK
IDENTITY_WIDTH = _COLUMNS * _BLOCK
DEPTH_CODE_MAX = 4095

_SWAY = 32  # pixels that the background moves before it starts over


def _identity_bits(camera: int, episode: int, frame: int) -> NDArray[np.uint8]:
    number = (camera & 0xF) | (episode & 0xFF) << 4 | (frame & 0xFFF) << 12
    return ((number >> np.arange(_BITS)) & 1).astype(np.uint8)


class Painter:
    """Paints the RGB pictures of one camera.

    Args:
        camera: Camera number.
        height: Pixels, at least `IDENTITY_HEIGHT`.
        width: Pixels, at least `IDENTITY_WIDTH`.
        seed: Of the texture.
    """

    def __init__(self, camera: int, height: int, width: int, seed: int) -> None:
        self._camera = camera
        self._height = height
        self._width = width
        random = np.random.default_rng([seed, camera])
        y, x = np.mgrid[: height + _SWAY, : width + _SWAY].astype(np.float32)
        texture = np.full((height + _SWAY, width + _SWAY, 3), 120.0, dtype=np.float32)
        for _ in range(3):  # a few waves per colour: textured, yet cheap to encode
            step_y, step_x = random.uniform(-0.15, 0.15, size=2)
            phase = random.uniform(0, 2 * np.pi, size=3)
            texture += 32 * np.sin((step_y * y + step_x * x)[..., None] + phase).astype(np.float32)
        self._texture = texture.clip(0, 255).astype(np.uint8)

    def paint(self, episode: int, frame: int) -> NDArray[np.uint8]:
        """The picture of one frame, uint8 RGB, shape ``(height, width, 3)``."""
        top = (frame + 3 * episode) % _SWAY
        left = (2 * frame + 5 * episode) % _SWAY
        picture = self._texture[top : top + self._height, left : left + self._width].copy()
        blocks = _identity_bits(self._camera, episode, frame).reshape(_ROWS, _COLUMNS) * 255
        picture[:IDENTITY_HEIGHT, :IDENTITY_WIDTH] = np.kron(
            blocks, np.ones((_BLOCK, _BLOCK), dtype=np.uint8)
        )[..., None]
        return picture


def depth_codes(camera: int, episode: int, frame: int, height: int, width: int) -> NDArray[np.uint16]:
    """The 12-bit codes of one depth picture, uint16, shape ``(height, width)``.

    A slope whose level is different for every frame of a few thousand; lossless coding returns exactly
    this.
    """
    y, x = np.mgrid[:height, :width]
    level = 211 * camera + 97 * episode + 31 * frame
    codes: NDArray[np.uint16] = ((level + 5 * x + 11 * y) % (DEPTH_CODE_MAX + 1)).astype(np.uint16)
    return codes


def read_identities(pictures: ArrayLike | Any) -> NDArray[np.int64]:
    """Read the identities of a batch of pictures.

    Args:
        pictures: uint8, shape ``(..., 3, height, width)`` or ``(..., height, width, 3)``; an array or
            anything numpy makes one of, such as a CPU tensor.

    Returns:
        (camera, episode, frame) of each picture, int64, shape ``(..., 3)``.

    Raises:
        UsageError: The pictures are not uint8, not RGB, or too small to carry an identity.
    """
    array = np.asarray(pictures)
    if array.dtype != np.uint8 or array.ndim < 3 or 3 not in (array.shape[-3], array.shape[-1]):
        raise UsageError(
            f"Identities are read from uint8 RGB pictures, got {array.dtype} of shape {array.shape}."
        )
    if array.shape[-3] != 3:
        array = np.moveaxis(array, -1, -3)
    if array.shape[-2] < IDENTITY_HEIGHT or array.shape[-1] < IDENTITY_WIDTH:
        raise UsageError(
            f"Pictures of {array.shape[-2]} x {array.shape[-1]} pixels cannot carry an identity, which needs "
            f"{IDENTITY_HEIGHT} x {IDENTITY_WIDTH}."
        )
    lead = array.shape[:-3]
    corner = array[..., :IDENTITY_HEIGHT, :IDENTITY_WIDTH]
    blocks = corner.reshape(*lead, 3, _ROWS, _BLOCK, _COLUMNS, _BLOCK)
    # The rim of a block takes some of its neighbours' light in lossy coding; only the inside counts.
    inside = blocks[..., 2:6, :, 2:6]
    level = inside.mean(axis=(-5, -3, -1), dtype=np.float32)
    bits = (level > 127.5).reshape(*lead, _BITS).astype(np.int64)
    numbers = bits @ (np.int64(1) << np.arange(_BITS, dtype=np.int64))
    return np.stack([numbers & 0xF, numbers >> 4 & 0xFF, numbers >> 12], axis=-1)


def read_identity(picture: ArrayLike | Any) -> tuple[int, int, int]:
    """Read (camera, episode, frame) from one uint8 RGB picture, CHW or HWC.

    Raises:
        UsageError: As `read_identities`.
    """
    array = np.asarray(picture)
    if array.ndim != 3:
        raise UsageError(f"One picture has three dimensions, got shape {array.shape}.")
    camera, episode, frame = (int(part) for part in read_identities(array))
    return camera, episode, frame
