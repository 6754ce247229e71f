"""Nothing that could be a credential leaves through the command line (K31)."""

from __future__ import annotations

import pytest

from lrstream.cli.redaction import redact

TOKEN = "hf_" + "aB3" * 11 + "x"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"401 for {TOKEN}.", "401 for hf_***."),
        (f"Authorization: Bearer {TOKEN}", "Authorization: Bearer ***"),
        ("authorization: Basic dXNlcjpwYXNzd29yZA==", "authorization: Basic ***"),
        (
            "GET https://cdn.example/a/b.mp4?X-Amz-Signature=SENTINEL&Expires=1 gave 403",
            "GET https://cdn.example/a/b.mp4?*** gave 403",
        ),
        ("(s3://bucket/key?versionId=7)", "(s3://bucket/key?***)"),
        ("https://me:secret@host.example/x", "https://***@host.example/x"),
        ("Signature=SENTINEL&Key-Pair-Id=K1", "Signature=***&Key-Pair-Id=***"),
        ("secret_key='SENTINEL'", "secret_key=***"),
        ("token=abc123", "token=***"),
    ],
)
def test_secrets_are_blanked(text: str, expected: str) -> None:
    assert redact(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "/data/hf_datasets/token/file-000.mp4",
        "What is this? A question.",
        "hf://datasets/owner/name@main/path does not exist.",
        "episode 3 of 'pick=place'",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY"])
def test_values_of_the_environment_are_blanked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "hf_SENTINEL")
    assert redact("headers={'x': 'hf_SENTINEL'}") == "headers={'x': '***'}"


def test_a_short_value_of_the_environment_does_not_blank_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a")
    assert redact("a path") == "a path"
