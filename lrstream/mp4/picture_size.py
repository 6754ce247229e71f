"""How many bytes a decoded picture takes, from the sample description alone.

The figure is an upper bound, so that a memory limit that counts it is kept by whatever decoder is
installed: decoders round rows and their number up, to as much as 128 pixels (libdav1d), before they
allocate. Depth and chroma come from the codec's own configuration record, or are taken to be the
largest that its profile allows.
"""

from __future__ import annotations

from lrstream.mp4.boxes import Box
from lrstream.mp4.codec_config import CodecConfig, visual_extensions

__all__ = ["decoded_picture_bytes"]

_ALIGNMENT = 128
# libdav1d avoids rows of a multiple of 1024 bytes, which fall into few lines of a cache.
_ROW_SLACK = 64
# Samples for each luma sample, in quarters: chroma_format_idc 0 (gray) to 3 (4:4:4).
_QUARTERS = (4, 6, 8, 12)
_GRAY, _420, _422, _444 = range(4)

# H.264 profiles with more than 8 bits of 4:2:0 (ISO/IEC 14496-10, annex A).
_H264_PROFILES = {110: (2, _420), 122: (2, _422), 244: (2, _444), 44: (2, _444)}


def decoded_picture_bytes(config: CodecConfig, stsd_body: bytes) -> int:
    """Most bytes that one decoded picture takes, all planes with the padding of their rows.

    Args:
        config: From `codec_configuration`.
        stsd_body: What that was read from.

    Raises:
        MalformedMp4Error: The description does not fit its boxes.
    """
    sample_bytes, chroma = _sample_format(config, stsd_body)
    width = -(-config.width // _ALIGNMENT) * _ALIGNMENT
    width += _ROW_SLACK * (width % 512 == 0)
    height = -(-config.height // _ALIGNMENT) * _ALIGNMENT
    return width * height * sample_bytes * _QUARTERS[chroma] // 4


def _sample_format(config: CodecConfig, stsd_body: bytes) -> tuple[int, int]:
    """Bytes of a sample, 1 or 2, and `chroma_format_idc`."""
    record = config.extradata
    if config.codec == "h264" and len(record) > 1:
        return _H264_PROFILES.get(record[1], (1, _420))
    if config.codec == "hevc" and len(record) > 18:
        depth = 8 + max(record[17] & 7, record[18] & 7)
        return 1 + (depth > 8), record[16] & 3
    if config.codec == "av1" and len(record) > 2:
        flags = record[2]
        monochrome, half_width, half_height = flags >> 4 & 1, flags >> 3 & 1, flags >> 2 & 1
        chroma = _GRAY if monochrome else (_444, _422)[half_width] if not half_height else _420
        return 1 + (flags >> 6 & 1), chroma
    if config.codec == "vp9":
        vpcc: Box | None = visual_extensions(stsd_body).get("vpcC")
        if vpcc is None:
            return 2, _444
        value = vpcc.uint(6, 1)
        return 1 + (value >> 4 > 8), (_420, _420, _422, _444)[min(value >> 1 & 7, 3)]
    if config.codec in ("vp8", "mpeg4"):
        return 1, _420
    return 2, _444
