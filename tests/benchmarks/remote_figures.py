"""What reading from remote roots takes, in figures: ``python -m tests.benchmarks.remote_figures``.

Against the Hub, the buckets and the S3 of this machine, in fresh homes, through the commands and the loader
as a user has them. One line of JSON for each part; ends with status 1 if one of them is not as it should be.
Parts are named as arguments: ``hub``, ``bucket``, ``s3``, ``memory``, ``access``; all without any.
"""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks.parts import Part, run_parts

# isort: split
import fsspec
import pytest

from lrstream import StreamingLeRobotDataset
from tests.cli.program import run_process
from tests.support.datasets import DatasetCache
from tests.support.hub import LoopbackHub, RequestRecord
from tests.support.remote import Sample, assert_no_credentials, assert_same_epoch, epoch, spans_by_file

READS = ("GET", "HEAD")
MARKS = ("SENTINEL", "Signature=", "X-Amz-Signature")
PRIVATE, ABSENT = "robots/private", "robots/absent"


class Stage:
    """One part: a directory, homes, environment changes that end with it, and the dataset."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.patch = patch
        self.root = DatasetCache(directory / "datasets").get("standard").root
        self.expected = self.local()

    def local(self, **options: Any) -> list[Sample]:
        """Samples read from the directory, in a home of their own."""
        self.home("local")
        return epoch(self.root, **options)

    def home(self, name: str) -> Path:
        """Make a fresh home that of this process."""
        home = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.directory))
        self.patch.setenv("HF_HOME", str(home))
        self.patch.setenv("HF_LEROBOT_HOME", str(home / "lerobot"))
        return home


def number_of_equal(found: list[Sample], expected: list[Sample]) -> int:
    """All of them, or an error."""
    assert_same_epoch(found, expected)
    return len(found)


def figures_of(records: list[RequestRecord], root: Path, archive: Path) -> dict[str, Any]:
    """Requests and bytes of a training run, held against the spans that it needs."""
    spans = spans_by_file(root, archive)
    needed = sum((stop - start) * times for file in spans.values() for (start, stop), times in file.items())
    payload = [record for record in records if ".mp4" in record.path and record.server == "cdn"]
    wanted = {f"bytes={start}-{stop - 1}" for file in spans.values() for start, stop in file}
    headers = [record for record in payload if record.range not in wanted]
    return {
        "requests": len(records),
        "requests_for_spans": len(payload),
        "spans": sum(sum(file.values()) for file in spans.values()),
        "mp4_header_reads": len(headers),
        "writes": len([record for record in records if record.method not in READS]),
        "authorization_on_signed_host": sum(
            record.authorization is not None for record in records if record.server == "cdn"
        ),
        "payload_bytes_by_spans": round(sum(record.bytes_sent for record in payload) / needed, 4),
    }


def build_and_publish(source: str, env: dict[str, str]) -> tuple[Path, dict[str, Any]]:
    """As a maintainer does it, each command a process."""
    built = run_process("build", source, "--checksums", "--json", env=env)
    assert built.code == 0, built.out + built.err
    validated = run_process("validate", source, "--json", env=env)
    assert validated.code == 0, validated.out
    archive = Path(built.document()["result"]["path"])
    published = run_process("publish", archive, source, "--json", env=env)
    assert published.code == 0, published.out + published.err
    return archive, published.document()["result"]


def hub_part(stage: Stage) -> dict[str, Any]:
    """A private repository: two ranks with two workers each."""
    expected = stage.local(world_size=2, num_workers=2)
    with LoopbackHub.start() as hub:
        hub.create_dataset("robots/pick", stage.root, private=True)
        maintainer = stage.directory / "maintainer"
        archive, published = build_and_publish("robots/pick", hub.env(hub.write_token, home=maintainer))
        home = stage.home("trainer")
        hub.connect_process(stage.patch, hub.read_token)
        references = hub.references("robots/pick")
        hub.log.clear()
        found = epoch("robots/pick", world_size=2, num_workers=2)
        assert hub.references("robots/pick") == references
        figures = figures_of(list(hub.log), stage.root, archive)
        assert_no_credentials(hub, home)
        assert_no_credentials(hub, maintainer)
    return {
        "equal": number_of_equal(found, expected),
        "published": [published["action"], published["checksums"]["action"]],
        **figures,
    }


def bucket_part(stage: Stage) -> dict[str, Any]:
    """A private bucket, the dataset at its root and below; then a video is replaced at the same size."""
    expected = stage.local(num_workers=2)
    result: dict[str, Any] = {}
    for name, inner in (("root", ""), ("below", "sets/a b")):
        with LoopbackHub.start() as hub:
            folder = stage.directory / f"bucket-{name}"
            shutil.copytree(stage.root, folder / inner)
            hub.create_bucket("robots/store", folder, private=True)
            source = f"hf://buckets/robots/store/{inner}".rstrip("/")
            maintainer = stage.directory / f"maintainer-{name}"
            archive, published = build_and_publish(source, hub.env(hub.write_token, home=maintainer))
            uploads = hub.log.count("/batch", method="POST", status=200)
            stage.home("trainer")
            hub.connect_process(stage.patch, hub.read_token)
            before = hub.bucket_files("robots/store")
            hub.log.clear()
            found = epoch(source, num_workers=2)
            figures = figures_of(list(hub.log), stage.root, archive)
            assert hub.bucket_files("robots/store") == before
            path = f"{inner}/videos/observation.images.front/chunk-000/file-000.mp4".lstrip("/")
            data = bytearray(before[path])
            data[data.index(b"mdat") + 4] ^= 1
            hub.replace_bucket_file("robots/store", path, bytes(data))
            hub.log.clear()
            StreamingLeRobotDataset(source).close()
            result[name] = {
                "equal": number_of_equal(found, expected),
                "published": [published["action"], published["checksums"]["action"]],
                "uploads": uploads,
                **figures,
                "files_indexed_again_after_replacement": len(
                    {record.path for record in hub.log.records(r"\.mp4$", server="cdn")}
                ),
            }
    return result


def s3_part(stage: Stage) -> dict[str, Any]:
    """Through s3fs; then an object is replaced at the same size."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request otherwise

    expected = stage.local(num_workers=2)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        stage.patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        stage.patch.setenv("NO_PROXY", "127.0.0.1,localhost")
        options = {
            "key": "AKIALOOPBACK",
            "secret": "loopback-secret-SENTINEL",
            "client_kwargs": {"endpoint_url": f"http://{host}:{port}", "region_name": "eu-west-1"},
        }
        client = fsspec.filesystem("s3", skip_instance_cache=True, **options)
        client.mkdir("robots")
        client.put(f"{stage.root}/", "robots/sets/pick/", recursive=True)
        home = stage.home("trainer")
        # Commands take credentials from the environment; the loader here from its argument.
        environment = {
            "AWS_ACCESS_KEY_ID": "AKIALOOPBACK",
            "AWS_SECRET_ACCESS_KEY": "loopback-secret-SENTINEL",
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_DEFAULT_REGION": "eu-west-1",
        }
        for command in ("build", "validate"):
            words = ("--checksums",) if command == "build" else ()
            done = run_process(command, "s3://robots/sets/pick", *words, env=environment)
            assert done.code == 0, done.out + done.err
            assert not any(mark in done.out + done.err for mark in MARKS)
        result = fsspec_figures("s3://robots/sets/pick", expected, client, options, stage.root)
        for file in home.rglob("*"):
            assert not file.is_file() or b"SENTINEL" not in file.read_bytes()
        return result
    finally:
        server.stop()


def memory_part(stage: Stage) -> dict[str, Any]:
    """`memory://`, which says nothing of a file's content but its size: indexed anew at each opening."""
    expected = stage.local(num_workers=2)
    client = fsspec.filesystem("memory")
    client.put(f"{stage.root}/", "/pick/", recursive=True)
    stage.home("trainer")
    return fsspec_figures("memory://pick", expected, client, {}, stage.root)


def fsspec_figures(
    source: str, expected: list[Sample], client: Any, options: dict[str, Any], root: Path
) -> dict[str, Any]:
    found = epoch(source, num_workers=2, start_method="fork", storage_options=options)
    with StreamingLeRobotDataset(source, storage_options=options) as dataset:
        requests = dataset._store.counters.requests
        first = sum(1 for _ in dataset)
        metrics = dataset.metrics()
        archive = dataset._sidecar
        assert archive is not None
        spans = spans_by_file(root, archive)
        needed = sum(
            (stop - start) * times for file in spans.values() for (start, stop), times in file.items()
        )
    path = f"{source}/videos/observation.images.front/chunk-000/file-000.mp4"
    data = bytearray(client.cat_file(path))
    data[data.index(b"mdat") + 4] ^= 1
    client.pipe_file(path, bytes(data))
    with StreamingLeRobotDataset(source, storage_options=options) as dataset:
        is_new = dataset._sidecar != archive
    return {
        "equal": number_of_equal(found, expected),
        "samples_without_workers": first,
        "requests_of_opening": requests,
        "requests": metrics["storage"]["requests"],
        "payload_bytes_by_spans": round(metrics["fetched_bytes"] / needed, 4),
        "payload_checks": metrics["payload_checks"],
        "another_sidecar_after_replacement": is_new,
    }


def access_part(stage: Stage) -> dict[str, Any]:
    """What users without the right token, or without a network, are told; and that no secret is."""
    result: dict[str, Any] = {}
    with LoopbackHub.start() as hub:
        hub.create_dataset(PRIVATE, stage.root, private=True)
        home = stage.directory / "user"
        none, wrong = None, "hf_WrongTokenSENTINEL0123456789abcdef"
        cases: dict[str, tuple[str | None, tuple[str, ...], dict[str, str]]] = {
            "no token, private": (none, ("build", PRIVATE), {}),
            "no token, missing repository": (none, ("build", ABSENT), {}),
            "wrong token": (wrong, ("build", PRIVATE), {}),
            "token of a stranger": (hub.stranger_token, ("build", PRIVATE), {}),
            "token, missing repository": (hub.read_token, ("build", ABSENT), {}),
            "token that can only read, --push": (hub.read_token, ("build", PRIVATE, "--push"), {}),
            "no such revision": (hub.read_token, ("build", PRIVATE, "--revision", "v9.9"), {}),
            "no network": (hub.read_token, ("build", PRIVATE), {"HF_ENDPOINT": "http://hub.invalid"}),
            "token that can read": (hub.read_token, ("build", PRIVATE), {}),
        }
        for name, (token, words, extra) in cases.items():
            begun = time.monotonic()
            done = run_process(*words, "--json", env=_environment(hub, token, home, extra))
            seconds = time.monotonic() - begun
            problems = done.document()["problems"]
            said = problems[0] if problems else {"code": "", "message": "", "hint": ""}
            plain = run_process(*words, "--debug", env=_environment(hub, token, home, extra))
            for text in (done.out, done.err, plain.out, plain.err):
                assert not any(mark in text for mark in MARKS), f"{name}: a secret was told"
            result[name] = {
                "exit": done.code,
                "code": said["code"],
                "seconds": round(seconds, 1),
                "message": f"{said['message']} {said['hint'] or ''}".strip(),
            }
        assert hub.log.count(method="PUT") == 0
        assert_no_credentials(hub, home)
    expected = [4, 4, 4, 4, 4, 4, 4, 5, 0]
    assert [case["exit"] for case in result.values()] == expected, result
    return result


def _environment(hub: LoopbackHub, token: str | None, home: Path, extra: dict[str, str]) -> dict[str, str]:
    environment = {**hub.env(token, home=home), **extra}
    if token is None:
        environment["HF_TOKEN"] = ""
    return environment


PARTS: dict[str, Callable[[Stage], dict[str, Any]]] = {
    "hub": hub_part,
    "bucket": bucket_part,
    "s3": s3_part,
    "memory": memory_part,
    "access": access_part,
}


def main(names: list[str]) -> int:
    """Run the parts, print a line for each; 0 if all are as they should be."""

    def staged(part: Callable[[Stage], dict[str, Any]]) -> Part:
        return lambda directory, patch: part(Stage(directory, patch))

    return run_parts({name: staged(part) for name, part in PARTS.items()}, names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
