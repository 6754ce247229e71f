"""The one error tree of lrstream.

    LrstreamError                      exit 1   a bug, or a failure without a better class
    ├── UsageError                     exit 2   an argument has a value that cannot work
    ├── CheckFailedError               exit 3   a check was made and said no
    ├── NotFoundError                  exit 4   a file, dataset, episode or revision is not there
    ├── AccessError                    exit 4   it may be there, but this user may not read or write it
    ├── TransferError                  exit 5   bytes could not be moved; trying again may help
    ├── SidecarLockTimeoutError        exit 5   another process held the lock for too long
    ├── InputError                     exit 6   malformed, unsupported or outdated input
    │   ├── DatasetFormatError                  metadata or tables of a dataset
    │   ├── Mp4Error                            an MP4 file
    │   │   ├── MalformedMp4Error               it contradicts ISO BMFF or itself
    │   │   └── UnsupportedMp4Error             it is valid, but needs what lrstream does not do
    │   ├── SidecarError                        a sidecar archive or mapped index
    │   ├── TimestampError                      no picture within the tolerance of a row's time
    │   ├── DecodeError                         a decoder refused bytes, or none is available
    │   └── PayloadError                        bytes of a video are not those that were checksummed
    └── LimitError                     exit 7   a limit was reached
        ├── ByteBudgetError                     an episode does not fit the byte budget
        └── DiskFullError                       no space, or over quota

Every error can be built from one string. `torch.utils.data.DataLoader` rebuilds a worker's error
as ``type(error)(message)``, so a class that insisted on more would reach training as a bare
`RuntimeError`. Fields given by keyword survive pickling and are meant for programs; the message
alone must be enough for a person.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AccessError",
    "ByteBudgetError",
    "CheckFailedError",
    "DatasetFormatError",
    "DecodeError",
    "DiskFullError",
    "InputError",
    "LimitError",
    "LrstreamError",
    "MalformedMp4Error",
    "Mp4Error",
    "NotFoundError",
    "PayloadError",
    "SidecarError",
    "SidecarLockTimeoutError",
    "TimestampError",
    "TransferError",
    "UnsupportedMp4Error",
    "UsageError",
]


class LrstreamError(Exception):
    """Root of all errors that lrstream raises on purpose.

    Args:
        message: What happened, where, what was expected and what was found, in one sentence or two.
        hint: What the reader can do about it, as one sentence; kept apart from the message so that
            the command line can set it off, and joined to it in `str`.
        **fields: Facts for programs (``file_path``, ``box``, ``episode_index``, ``camera``, ...).

    Attributes:
        exit_code: Exit status of the command line for this class (CL-4).
        code: Stable short name of this class of failure, for ``--json`` and documentation.
    """

    exit_code: int = 1
    code: str = "internal"

    def __init__(self, message: str = "", *, hint: str | None = None, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.fields = fields

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.hint, self.fields))


def _rebuild(
    cls: type[LrstreamError], message: str, hint: str | None, fields: dict[str, Any]
) -> LrstreamError:
    return cls(message, hint=hint, **fields)


class UsageError(LrstreamError, ValueError):
    """An argument or option has a value that cannot work; nothing has been done yet."""

    exit_code = 2
    code = "usage"


class CheckFailedError(LrstreamError):
    """A check that was asked for has found problems."""

    exit_code = 3
    code = "check-failed"


class NotFoundError(LrstreamError, FileNotFoundError):
    """A file, dataset, episode, camera or revision does not exist (or is not visible)."""

    exit_code = 4
    code = "not-found"

    # OSError.__str__ and OSError.__new__ give two positional arguments a meaning; we pass one.
    __str__ = LrstreamError.__str__


class AccessError(LrstreamError, PermissionError):
    """The store answered that this user may not do this."""

    exit_code = 4
    code = "no-access"

    __str__ = LrstreamError.__str__


class TransferError(LrstreamError, OSError):
    """Bytes could not be read or written completely; the same call may succeed later."""

    exit_code = 5
    code = "transfer"

    __str__ = LrstreamError.__str__


class SidecarLockTimeoutError(LrstreamError, TimeoutError):
    """Another process held a lock for longer than ``sidecar_lock_timeout_s``."""

    exit_code = 5
    code = "lock-timeout"

    __str__ = LrstreamError.__str__


class InputError(LrstreamError, ValueError):
    """Input is malformed, unsupported or outdated."""

    exit_code = 6
    code = "input"


class DatasetFormatError(InputError):
    """Metadata or tables of a dataset are missing parts or contradict each other."""

    code = "dataset"


class Mp4Error(InputError):
    """An MP4 file cannot be indexed or synthesized."""

    code = "mp4"


class MalformedMp4Error(Mp4Error):
    """An MP4 file is truncated, contradicts the standard, or contradicts itself."""

    code = "mp4-malformed"


class UnsupportedMp4Error(Mp4Error):
    """An MP4 file is valid but uses what lrstream refuses rather than misreads."""

    code = "mp4-unsupported"


class SidecarError(InputError):
    """A sidecar archive or mapped index is invalid, outdated or belongs to something else."""

    code = "sidecar"


class TimestampError(InputError):
    """No picture is presented within the tolerance of a row's time."""

    code = "timestamp"


class DecodeError(InputError):
    """A decoder refused the bytes, or no usable decoder for the codec is installed."""

    code = "decode"


class PayloadError(InputError):
    """Bytes of a video do not have the checksum that was made of them, or lack a required one."""

    code = "payload"


class LimitError(LrstreamError):
    """A limit that the user can move was reached."""

    exit_code = 7
    code = "limit"


class ByteBudgetError(LimitError):
    """An episode is larger than the whole byte budget."""

    code = "byte-budget"


class DiskFullError(LimitError, OSError):
    """There is no space left on the device, or a quota is exhausted."""

    code = "disk-full"

    __str__ = LrstreamError.__str__
