"""What a loader will reserve over an epoch, from its plan alone (LD-5, decision 4 of the design).

The loader admits and prefetches along one frontier, so what it has reserved when an anchor is scheduled
follows from the plan, up to one thing: how long decoding holds the bytes of episodes whose last anchor was
scheduled already. Two figures are given for that. *Nominal* assumes that their decodes have ended, which is
exact for ``decoded_queue_size=1``. *Bound* assumes that all `decoded_queue_size` samples that may be under
way still are, and that the budget never delays prefetch: more cannot be reserved at any speed of decoding.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from lrstream.streaming.pool import AnchorPlan, peak_resident_bytes

__all__ = ["Frontier", "Reservation", "reservation_of"]


@dataclass(frozen=True, slots=True)
class Reservation:
    """Largest number of bytes that one worker holds in an epoch.

    Attributes:
        peak_pool_bytes: Episodes of the pool alone.
        peak_reserved_bytes: Pool and prefetch, where decoding keeps up.
        bound_bytes: Pool, prefetch and episodes still decoding, at most.
        largest_pool: Most episodes in the pool at one time.
        is_budget_full: Whether the budget, not the pool size, kept an episode out of pool or prefetch.
    """

    peak_pool_bytes: int
    peak_reserved_bytes: int
    bound_bytes: int
    largest_pool: int
    is_budget_full: bool


def reservation_of(
    plan: AnchorPlan, *, budget_bytes: int | None, prefetch_episodes: int, decoded_queue_size: int
) -> Reservation:
    """Run the plan of one worker and count bytes.

    Args:
        plan: Its plan, with sizes.
        budget_bytes: Its budget; None for no limit.
        prefetch_episodes: Episodes fetched ahead of the pool.
        decoded_queue_size: Samples under way at most.
    """
    order = plan.admission_order().tolist()
    nominal = Frontier(plan, order, budget_bytes, prefetch_episodes)
    free = Frontier(plan, order, None, prefetch_episodes)
    decoding: deque[tuple[int, int]] = deque()  # (last anchor, bytes) of retired episodes
    decoding_bytes = num_anchors = num_resident = largest_pool = peak = bound = 0
    is_budget_full = False
    for block in plan:
        num_resident += len(block.admitted)
        largest_pool = max(largest_pool, num_resident)
        nominal.admit(len(block.admitted))
        free.admit(len(block.admitted))
        # Anchor `num_anchors` is scheduled while fewer than the queue's size are under way before it.
        while decoding and decoding[0][0] <= num_anchors - decoded_queue_size:
            decoding_bytes -= decoding.popleft()[1]
        peak = max(peak, nominal.reserved_bytes)
        bound = max(bound, free.reserved_bytes + decoding_bytes)
        is_budget_full |= nominal.reserved_bytes < free.reserved_bytes
        is_budget_full |= num_resident < plan.pool_size and nominal.num_waiting > 0
        num_anchors += len(block)
        for episode in block.retired:
            size = plan.size_of(episode)
            nominal.reserved_bytes -= size
            free.reserved_bytes -= size
            decoding.append((num_anchors - 1, size))
            decoding_bytes += size
        num_resident -= len(block.retired)
    return Reservation(
        peak_pool_bytes=peak_resident_bytes(plan),
        peak_reserved_bytes=peak,
        bound_bytes=bound if budget_bytes is None else min(bound, budget_bytes),
        largest_pool=largest_pool,
        is_budget_full=is_budget_full,
    )


class Frontier:
    """How far admission and prefetch have come along the order of admission.

    Args:
        plan: The plan of one worker.
        order: Its order of admission.
        budget_bytes: Its budget; None for no limit.
        prefetch: Episodes fetched ahead of the pool.

    Attributes:
        reserved_bytes: Bytes of the episodes that were begun; whoever retires one takes its bytes off.
    """

    def __init__(self, plan: AnchorPlan, order: list[int], budget_bytes: int | None, prefetch: int) -> None:
        self._plan = plan
        self._order = order
        self._budget_bytes = budget_bytes
        self._prefetch = prefetch
        self._num_admitted = 0
        self._num_begun = 0
        self.reserved_bytes = 0

    @property
    def num_begun(self) -> int:
        """Episodes whose fetch has begun, the first ones of the order."""
        return self._num_begun

    @property
    def num_waiting(self) -> int:
        """Episodes that are not admitted yet."""
        return len(self._order) - self._num_admitted

    def admit(self, count: int) -> None:
        """Admit the next episodes, then prefetch what the limits allow."""
        self._num_admitted += count
        while self._num_begun < self._num_admitted:
            self._begin()
        limit = min(len(self._order), self._num_admitted + self._prefetch)
        while self._num_begun < limit and self._has_room():
            self._begin()

    def _has_room(self) -> bool:
        size = self._plan.size_of(self._order[self._num_begun])
        return self._budget_bytes is None or self.reserved_bytes + size <= self._budget_bytes

    def _begin(self) -> None:
        self.reserved_bytes += self._plan.size_of(self._order[self._num_begun])
        self._num_begun += 1
