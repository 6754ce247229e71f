"""A Hub on the loopback interface that real huggingface_hub clients can talk to.

:class:`LoopbackHub` serves dataset repositories and storage buckets over HTTP/1.1 from three servers (the
Hub, a CDN that only takes signed URLs, and a content-addressed store), logs every request and misbehaves on
demand. The fixture ``loopback_hub`` lives in :mod:`tests.support.hub.plugin`.
"""

from tests.support.hub.accounts import Account
from tests.support.hub.faults import Fault, FaultKind
from tests.support.hub.loopback import LoopbackHub
from tests.support.hub.process import run_python
from tests.support.hub.request_log import RequestLog, RequestRecord

__all__ = ["Account", "Fault", "FaultKind", "LoopbackHub", "RequestLog", "RequestRecord", "run_python"]
