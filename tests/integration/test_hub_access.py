"""No access, nothing there, no network: each has its own message and status, and shows no credentials."""

from __future__ import annotations

from pathlib import Path

import pytest

from lrstream.demo import WrittenDataset
from tests.cli.program import Outcome, Program
from tests.support.hub import LoopbackHub
from tests.support.remote import assert_no_credentials, hurry_retries

pytest_plugins = ["tests.support.hub.plugin"]
pytestmark = pytest.mark.timeout(60)

OPEN, PRIVATE, GATED, ABSENT = "robots/open", "robots/private", "robots/gated", "robots/absent"
WRONG = "hf_MistypedTokenSENTINEL0123456789abcd"


@pytest.fixture
def hub(
    loopback_hub: LoopbackHub, tiny_dataset: WrittenDataset, monkeypatch: pytest.MonkeyPatch
) -> LoopbackHub:
    """An open, a private and a gated repository with the same dataset."""
    loopback_hub.create_dataset(OPEN, tiny_dataset.root)
    loopback_hub.create_dataset(PRIVATE, tiny_dataset.root, private=True)
    loopback_hub.create_dataset(GATED, tiny_dataset.root, gated=True)
    hurry_retries(monkeypatch)
    return loopback_hub


class Session:
    """The command line with one token or another, and a look at what it wrote."""

    def __init__(
        self,
        hub: LoopbackHub,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        home: Path,
    ) -> None:
        self._hub, self._monkeypatch, self._home = hub, monkeypatch, home
        self._lrstream = Program(capsys)

    def __call__(self, token: str | None, *arguments: str | Path) -> Outcome:
        self._monkeypatch.delenv("HF_TOKEN", raising=False)
        self._hub.connect_process(self._monkeypatch, token)
        self._hub.log.clear()
        # With --debug, which shows our log and the tracebacks of failures on stderr.
        outcome = self._lrstream(*arguments, "--json", "--debug")
        shown = outcome.out + outcome.err
        assert "SENTINEL" not in shown
        assert "Signature=" not in shown
        assert_no_credentials(self._hub, self._home)
        return outcome

    def message(self, token: str | None, *arguments: str | Path) -> tuple[int, str, str]:
        """Exit status, code and message of a failure."""
        outcome = self(token, *arguments)
        problem = outcome.document()["problems"][0]
        return outcome.code, problem["code"], f"{problem['message']} {problem['hint']}"


@pytest.fixture
def session(
    hub: LoopbackHub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    isolated_home: Path,
) -> Session:
    return Session(hub, monkeypatch, capsys, isolated_home)


def test_reading(hub: LoopbackHub, session: Session) -> None:
    """What a reader without, with a wrong, and with another's token is told."""
    cases = {
        (None, PRIVATE): (4, "not-found", "does not exist, or it is private: no token was found"),
        (None, ABSENT): (4, "not-found", "does not exist, or it is private: no token was found"),
        (hub.stranger_token, PRIVATE): (4, "not-found", "or the token of this process may not see it"),
        (hub.read_token, ABSENT): (4, "not-found", "or the token of this process may not see it"),
        (WRONG, PRIVATE): (4, "no-access", "does not accept the token of this process"),
        (WRONG, OPEN): (4, "no-access", "does not accept the token of this process"),
        (None, GATED): (4, "no-access", "is gated, and access was not granted"),
        (hub.stranger_token, GATED): (4, "no-access", "is gated, and access was not granted"),
    }
    for (token, repository), (status, code, text) in cases.items():
        found = session.message(token, "build", repository)
        assert found[:2] == (status, code), (token, repository, found)
        assert text in found[2], (token, repository, found)
        assert f"dataset repository {repository}" in found[2]
        # Refused once is refused: no further attempts.
        assert len(hub.log) == 1 or repository == GATED
    for token, repository in ((None, OPEN), (hub.read_token, PRIVATE), (hub.read_token, GATED)):
        assert session(token, "build", repository).code == 0


def test_writing(hub: LoopbackHub, session: Session, isolated_home: Path) -> None:
    """Permission is asked for before anything is built or written (K28)."""
    cases = {
        (None, OPEN): (4, "no-access", "not allowed to check write access (status 401"),
        (None, PRIVATE): (4, "not-found", "no token was found"),
        (hub.read_token, OPEN): (4, "no-access", "the token of this process cannot write there"),
        (hub.read_token, PRIVATE): (4, "no-access", "the token of this process cannot write there"),
        (hub.stranger_token, OPEN): (4, "no-access", "the token of this process cannot write there"),
        (WRONG, OPEN): (4, "no-access", "does not accept the token of this process"),
        (hub.write_token, ABSENT): (4, "not-found", "or the token of this process may not see it"),
    }
    for (token, repository), (status, code, text) in cases.items():
        found = session.message(token, "build", repository, "--push")
        assert found[:2] == (status, code), (token, repository, found)
        assert text in found[2], (token, repository, found)
        assert len(hub.log) == 1, "nothing else was asked before"
    assert not list(isolated_home.rglob("*.npz"))

    archive = session(hub.write_token, "build", OPEN).document()["result"]["path"]
    before = hub.references(OPEN)
    for token, text in ((hub.read_token, "cannot write there"), (None, "status 401")):
        status, code, message = session.message(token, "publish", archive, OPEN)
        assert (status, code) == (4, "no-access")
        assert text in message
        assert hub.log.count(method="POST") == 0
    assert hub.references(OPEN) == before


def test_no_network(hub: LoopbackHub, session: Session) -> None:
    hub.endpoint = "http://127.0.0.1:9"  # the port of "discard", where nobody listens
    status, code, message = session.message(hub.read_token, "build", OPEN)
    assert (status, code) == (5, "transfer")
    assert "given up after 4 attempts" in message


def test_no_network_later(hub: LoopbackHub, session: Session) -> None:
    """Failures of the network while metadata are downloaded are not taken for absent files."""
    hub.faults.add("meta/info.json", "reset")
    status, code, message = session.message(hub.read_token, "build", OPEN)
    assert (status, code) == (5, "transfer")
    assert "download meta/info.json" in message


@pytest.mark.parametrize(("kind", "arguments"), [("server-error", {}), ("rate-limit", {"retry_after": 3600})])
def test_a_hub_that_is_down(hub: LoopbackHub, session: Session, kind: str, arguments: dict[str, int]) -> None:
    hub.faults.add("/api/", kind, **arguments)  # type: ignore[arg-type]
    status, code, message = session.message(hub.read_token, "build", OPEN)
    assert (status, code) == (5, "transfer")
    assert "status 503" in message or "status 429" in message


def test_a_hub_that_recovers(hub: LoopbackHub, session: Session) -> None:
    hub.faults.add("/api/", "server-error", times=2)
    hub.faults.add("meta/", "reset", times=1)
    assert session(hub.read_token, "build", OPEN).code == 0


def test_a_revision_that_does_not_exist(session: Session) -> None:
    status, code, message = session.message(None, "build", OPEN, "--revision", "v9.9")
    assert (status, code) == (4, "not-found")
    assert f"dataset repository {OPEN} at v9.9: there is no such revision" in message


def test_a_repository_that_is_no_dataset(hub: LoopbackHub, session: Session) -> None:
    hub.create_dataset("robots/empty")
    status, code, message = session.message(None, "build", "robots/empty")
    assert (status, code) == (4, "not-found")
    assert "meta/info.json" in message


def test_a_refusal_by_the_storage_behind_the_hub(hub: LoopbackHub, session: Session) -> None:
    hub.faults.add(r"\.mp4$", "forbidden", server="cdn")
    outcome = session(hub.read_token, "build", PRIVATE)
    assert (outcome.code, set(outcome.codes())) == (4, {"no-access"})
    text = " ".join(problem["message"] for problem in outcome.document()["problems"])
    assert text.count("SignatureError") == 3, "once for each video, in the server's words"
