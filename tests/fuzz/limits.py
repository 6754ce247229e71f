"""What no input may exceed, and how it is measured (MP-3, K29)."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import pyarrow as pa

from lrstream.errors import LrstreamError

__all__ = ["MAX_CPU_S", "Measured", "Outcome", "measured", "memory_limit"]

MAX_CPU_S = 1.0

T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """How a call went: the refusal if there was one, CPU seconds, bytes of memory at the peak."""

    refusal: LrstreamError | None
    cpu_s: float
    peak_bytes: int


@dataclass(frozen=True)
class Outcome:
    """What became of one case.

    Attributes:
        mutation: What was done to the input.
        result: ``refused``, ``accepted``, or further than that.
        cpu_s: CPU seconds that the package took.
        peak_bytes: Memory that it held at most.
        input_bytes: Size of the input.
    """

    mutation: str
    result: str
    cpu_s: float
    peak_bytes: int
    input_bytes: int


def memory_limit(input_bytes: int) -> int:
    """Ten times the input and 64 MiB."""
    return 10 * input_bytes + (64 << 20)


def measured(call: Callable[[], T], input_bytes: int) -> tuple[T | None, Measured]:
    """Run `call` under the limits.

    CPU time is what is limited, since other processes of a busy machine take wall time; a wait that never
    ends is noticed by whoever watches the process.

    Raises:
        AssertionError: A limit was exceeded.
        BaseException: Whatever else than an error of lrstream escapes from `call`.
    """
    value, refusal = None, None
    arrow_before = pa.total_allocated_bytes()
    tracemalloc.start()
    start = time.thread_time()
    try:
        value = call()
    except LrstreamError as error:
        refusal = error
    finally:
        cpu_s = time.thread_time() - start
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    peak += max(0, pa.total_allocated_bytes() - arrow_before)
    assert cpu_s <= MAX_CPU_S, f"{cpu_s:.2f} s of CPU time"
    assert peak <= memory_limit(input_bytes), f"{peak} bytes of memory for an input of {input_bytes}"
    if refusal is not None:
        assert refusal.message.strip(), "an error without a message"
    return value, Measured(refusal, cpu_s, peak)
