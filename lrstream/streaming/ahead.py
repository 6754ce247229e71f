"""Batches taken from a DataLoader in a thread, so that training finds the next one ready."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["BatchesAhead"]

Batch = TypeVar("Batch")

# At the end of the interpreter nobody waits longer for a batch that is being made.
_EXIT_TIMEOUT_S = 5.0


class _Shared(Generic[Batch]):
    """What the thread and its owner have in common. The thread holds no reference to the owner.

    Attributes:
        ready: Batches, then the error that ended them or None.
        room: One item for each batch that may be made before training has asked for it. A queue and not a
            semaphore, which is written in Python and takes the time that is to be saved here.
        is_closed: Whether the thread is to end.
    """

    def __init__(self, batches: Iterator[Batch], count: int) -> None:
        self.ready: queue.SimpleQueue[tuple[Batch] | BaseException | None] = queue.SimpleQueue()
        self.room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(count):
            self.room.put(None)
        self.is_closed = False
        self._batches: Iterator[Batch] | None = batches

    def run(self) -> None:
        """Take batches until there are no more; belongs to the thread."""
        batches, self._batches = self._batches, None
        assert batches is not None
        end: BaseException | None = None
        try:
            while True:
                self.room.get()
                if self.is_closed:
                    return
                self.ready.put((next(batches),))
        except StopIteration:
            pass
        except BaseException as error:  # noqa: BLE001  (raised again where training asks for a batch)
            end = error
        finally:
            # What a DataLoader holds is let go before anybody hears of the end.
            del batches
            self.ready.put(end)


class BatchesAhead(Iterator[Batch]):
    """The items of an iterator, up to `count` of them taken before they are asked for.

    They come in the same order, and an error comes where it would have come. The iterator is used by one
    thread alone, from the first item on; owner and thread belong to one process and cross no fork.

    Args:
        batches: The iterator.
        count: Most items that are ready or being made, besides those handed out; at least 1.
    """

    def __init__(self, batches: Iterator[Batch], count: int) -> None:
        self._shared = _Shared(batches, count)
        self._thread: threading.Thread | None = threading.Thread(
            target=self._shared.run, name="lrstream-ahead", daemon=True
        )
        # Also where nobody closes it: a thread in the middle of a batch must not outlive the interpreter.
        self._finalizer = weakref.finalize(self, _end, self._shared, self._thread, _EXIT_TIMEOUT_S)
        self._thread.start()

    def __next__(self) -> Batch:
        if self._thread is None:
            raise StopIteration
        item = self._shared.ready.get()
        if isinstance(item, tuple):
            self._shared.room.put(None)
            return item[0]
        self.close()
        if item is None:
            raise StopIteration
        try:
            raise item
        finally:
            del item  # the error's traceback holds this frame, which held the error

    def close(self) -> None:
        """Take no more; waits for the item that is being made, and drops those that are ready."""
        if self._thread is not None:
            thread, self._thread = self._thread, None
            self._finalizer.detach()
            _end(self._shared, thread, None)


def _end(shared: _Shared[Batch], thread: threading.Thread, timeout_s: float | None) -> None:
    shared.is_closed = True
    shared.room.put(None)
    if thread is not threading.current_thread():
        thread.join(timeout_s)
    while not shared.ready.empty():
        shared.ready.get_nowait()
