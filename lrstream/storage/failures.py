"""Foreign exceptions of storage, turned into the one error tree."""

from __future__ import annotations

import errno
import re

from lrstream.errors import AccessError, DiskFullError, LrstreamError, NotFoundError, TransferError

__all__ = ["describe", "storage_error"]

# Client libraries of object stores report missing credentials in classes of their own that are no
# OSError; the libraries are optional, so the classes are known by name only.
_CREDENTIAL_ERRORS = ("NoCredentials", "PartialCredentials", "CredentialRetrieval", "NoAuth", "Unauthorized")
_QUERY = re.compile(r"\?[^\s'\")>]+")


def describe(error: BaseException) -> str:
    """Class and text of a foreign exception, with query strings (signatures, tokens) cut out."""
    text = _QUERY.sub("?...", str(error)).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def storage_error(error: Exception, where: str) -> LrstreamError:
    """The error to raise for a failed access to ``where`` (a full path or URL, without secrets).

    Args:
        error: What the operating system or the client library raised.
        where: What was being accessed, for the message.

    Returns:
        NotFoundError, AccessError, DiskFullError, or TransferError for everything else.
    """
    if isinstance(error, LrstreamError):
        return error
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return NotFoundError(f"{where} does not exist.", where=where)
    if isinstance(error, IsADirectoryError):
        return NotFoundError(f"{where} is a directory, expected a file.", where=where)
    if isinstance(error, PermissionError):
        return AccessError(
            f"{where} may not be read by this user ({describe(error)}).",
            hint="Check its permissions and the credentials of this process.",
            where=where,
        )
    if any(name in cls.__name__ for cls in type(error).__mro__ for name in _CREDENTIAL_ERRORS):
        return AccessError(
            f"{where}: no usable credentials ({describe(error)}).",
            hint="Make them available to every worker: environment, configuration files or storage_options.",
            where=where,
        )
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(f"{where}: {describe(error)}.", where=where)
    if number in (errno.EMFILE, errno.ENFILE):
        return TransferError(
            f"{where} could not be opened: too many open files.",
            hint="Raise the limit (ulimit -n) or use fewer workers.",
            where=where,
        )
    return TransferError(f"{where} could not be read: {describe(error)}.", where=where)
