"""The rules of the tree: which part may import which, and which libraries."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lrstream

PACKAGE = Path(lrstream.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# Lower parts know nothing of higher ones. Equal numbers are apart unless PEERS joins them.
RANK = {
    "errors": 0,
    "timebase": 0,
    "mp4": 1,
    "layout": 2,
    "storage": 2,
    "sidecar": 3,
    "index": 3,
    "streaming": 3,
    "demo": 4,
    "commands": 4,
    "integrations": 4,
    "cli": 5,
}
PEERS = {
    ("layout", "storage"),
    ("index", "sidecar"),
    ("sidecar", "index"),
    ("streaming", "sidecar"),
    ("streaming", "index"),
    ("commands", "demo"),
}
# Modules that decide without reading anything.
PURE = ["mp4", "streaming/partition.py", "streaming/pool.py"]
IO_MODULES = {
    "asyncio", "fsspec", "glob", "http", "huggingface_hub", "io", "mmap", "multiprocessing", "os", "pathlib",
    "requests", "s3fs", "shutil", "socket", "sqlite3", "subprocess", "tempfile", "urllib", "urllib3",
    "zipfile", "pyarrow", "av", "PIL", "httpx",
}  # fmt: skip
LIBRARIES = {
    "av", "click", "dask", "datasets", "distributed", "filelock", "fsspec", "huggingface_hub", "httpx",
    "hypothesis", "lerobot", "mypy", "numpy", "pandas", "PIL", "prometheus_client", "pyarrow", "pytest",
    "requests", "rich", "s3fs", "torch", "torchcodec", "tqdm", "typer", "urllib3", "zstandard",
}  # fmt: skip


def part_of(module: str) -> str:
    """Name in RANK of a dotted module name below lrstream; empty for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def dotted(path: Path) -> str:
    relative = path.relative_to(PACKAGE.parent).with_suffix("")
    parts = relative.parts[:-1] if relative.name == "__init__" else relative.parts
    return ".".join(parts)


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Absolute names of all modules that a file imports, at any depth, with line numbers."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            assert node.module is not None
            yield node.module, node.lineno
            for name in node.names:
                # "from lrstream import mp4" names a part too; names that are no modules do no harm.
                if node.module == "lrstream" and name.name in RANK:
                    yield f"lrstream.{name.name}", node.lineno


def violations(path: Path) -> list[str]:
    """Imports of `path` that point the wrong way."""
    here = part_of(dotted(path))
    found = []
    for name, line in imports_of(path):
        there = part_of(name)
        if name.split(".")[0] != "lrstream" or not there or there == here or not here:
            continue
        if here not in RANK or there not in RANK:
            found.append(f"{path}:{line}: {name} is of a part without a rank")
        elif RANK[there] >= RANK[here] and (here, there) not in PEERS:
            found.append(f"{path}:{line}: {here} must not import {name}")
    return found


def test_dependencies_point_one_way() -> None:
    # __main__ is the entry point; __init__ resolves public names lazily.
    found = [
        line
        for path in MODULES
        if path.parent != PACKAGE or part_of(dotted(path)) in RANK
        for line in violations(path)
    ]
    assert not found, "\n".join(found)


def test_the_rules_notice_a_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "lrstream"
    (fake / "mp4").mkdir(parents=True)
    (fake / "layout").mkdir()
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", fake)
    upwards = fake / "mp4" / "upwards.py"
    upwards.write_text("def f():\n    from lrstream.layout import info\n")
    downwards = fake / "layout" / "downwards.py"
    downwards.write_text("from lrstream.mp4 import track\nfrom lrstream import errors\n")
    assert violations(upwards) == [f"{upwards}:2: mp4 must not import lrstream.layout"]
    assert violations(downwards) == []


def test_only_streaming_and_integrations_import_torch() -> None:
    found = [
        f"{path}:{line}"
        for path in MODULES
        for name, line in imports_of(path)
        if name.split(".")[0] in ("torch", "torchvision", "torchcodec")
        and part_of(dotted(path)) not in ("streaming", "integrations")
    ]
    assert not found


def test_only_the_command_line_imports_typer_and_rich() -> None:
    found = [
        f"{path}:{line}"
        for path in MODULES
        for name, line in imports_of(path)
        if name.split(".")[0] in ("typer", "rich") and part_of(dotted(path)) != "cli"
    ]
    assert not found


@pytest.mark.parametrize("where", PURE)
def test_pure_modules_do_no_input_or_output(where: str) -> None:
    target = PACKAGE / where
    paths = sorted(target.rglob("*.py")) if target.is_dir() else [target]
    assert paths
    for path in paths:
        assert path.exists(), path
        for name, line in imports_of(path):
            assert name.split(".")[0] not in IO_MODULES, f"{path}:{line}: {name}"
        calls = [
            node.func.id
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        ]
        assert not {"open", "print", "input"} & set(calls), path


def test_no_module_is_named_like_a_library() -> None:
    # An integration bears the name of what it is for, one package deeper, where it hides nothing.
    paths = [path for path in MODULES if path.parent.parent != PACKAGE / "integrations"]
    names = {path.stem for path in MODULES} | {path.parent.name for path in paths}
    names -= {"__init__", "__main__", "lrstream"}
    # `commands` is meant in both senses by nobody: the standard library's left with Python 2.
    assert not names & (set(sys.stdlib_module_names) | LIBRARIES)


def test_modules_are_small() -> None:
    long = {
        str(path): lines
        for path in MODULES
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 450
    }
    assert not long, "split by job: " + str(long)
