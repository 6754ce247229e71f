"""Signed, expiring URLs of the loopback CDN."""

import hmac
import secrets
import time
from urllib.parse import quote

from tests.support.hub.wire import Reply, Request, expired_reply, text_reply


class UrlSigner:
    """Signs paths of one server and checks them again.

    Attributes:
        base_url: Scheme, host and port put in front of the path.
        lifetime_s: Seconds a new URL is good for.
    """

    def __init__(self, base_url: str, lifetime_s: float = 3600.0) -> None:
        self.base_url = base_url
        self.lifetime_s = lifetime_s
        self._key = secrets.token_bytes(16)
        self._generation = 0

    def sign(self, path: str) -> str:
        """Full URL for an unquoted path."""
        quoted = quote(path)
        expires = f"{time.time() + self.lifetime_s:.3f}"
        stamp = f"Expires={expires}&Key-Pair-Id=LOOPBACK{self._generation}"
        return f"{self.base_url}{quoted}?{stamp}&Signature={self._signature(quoted, stamp)}"

    def expire_all(self) -> None:
        """Lets every URL signed so far count as expired."""
        self._generation += 1

    def refusal(self, request: Request) -> Reply | None:
        """None for a good URL, else the 403 to answer."""
        stamp, _, signature = request.query.partition("&Signature=")
        if not hmac.compare_digest(signature, self._signature(request.path, stamp)):
            return text_reply("<Error><Code>SignatureDoesNotMatch</Code></Error>", 403)
        expires = float(request.parameter("Expires") or 0)
        if expires < time.time() or request.parameter("Key-Pair-Id") != f"LOOPBACK{self._generation}":
            return expired_reply()
        return None

    def _signature(self, quoted_path: str, stamp: str) -> str:
        return hmac.digest(self._key, f"{quoted_path}?{stamp}".encode(), "sha256").hex()
