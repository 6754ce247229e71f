"""Keep credentials out of everything that is printed (K31).

Errors of lrstream carry no secrets by construction. Texts of other libraries may: a signed URL in an
exception, a token in a header dump. So every text that leaves through the command line passes here.
"""

from __future__ import annotations

import os
import re

__all__ = ["redact"]

_SECRET_VARIABLES = (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
)
# Shorter values would blank ordinary words; no issuer gives out secrets this short.
_MIN_SECRET_CHARS = 6

_PATTERNS = (
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}"), r"\1 ***"),
    # Real tokens have 34 characters after the prefix; the bound spares names such as hf_datasets.
    (re.compile(r"\bhf_[A-Za-z0-9]{20,}"), "hf_***"),
    # Everything after the question mark of a URL: signed URLs differ in what they call their parts.
    (re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]*://[^\s?\"'<>]*)\?[^\s\"'<>)\]]+"), r"\1?***"),
    (re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]*://)[^\s/@\"'<>]+@"), r"\1***@"),
    (
        re.compile(
            r"(?i)\b((?:x-amz-|x-goog-)?(?:signature|credential|security-token|sig|token|secret|password"
            r"|access_key|secret_key|api_key|key-pair-id|policy))=(?:'[^']*'|\"[^\"]*\"|[^\s&\"'<>,;)]+)"
        ),
        r"\1=***",
    ),
)


def redact(text: str) -> str:
    """`text` with tokens, signatures, query strings of URLs and passwords in URLs blanked."""
    for name in _SECRET_VARIABLES:
        secret = os.environ.get(name, "")
        if len(secret) >= _MIN_SECRET_CHARS:
            text = text.replace(secret, "***")
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text
