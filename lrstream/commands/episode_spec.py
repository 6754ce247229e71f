"""Episodes as people write them: ``0-9,12,20-``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from lrstream.errors import NotFoundError, UsageError

__all__ = ["EpisodeSpec", "parse_episode_spec"]

_PART = re.compile(r"(\d+)(-(\d+)?)?")
_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """Ranges of ``episode_index``.

    Attributes:
        text: What was written.
        ranges: Half-open (start, stop), stop None for an open end; ascending and disjoint.
    """

    text: str
    ranges: tuple[tuple[int, int | None], ...]

    def select(self, available: Iterable[int]) -> list[int]:
        """The episodes of `available` that are meant, ascending.

        Raises:
            NotFoundError: An episode that is named, alone or as the end of a range, is not available.
        """
        present = sorted(available)
        known = set(present)
        ends = {end for start, stop in self.ranges for end in (start, start if stop is None else stop - 1)}
        missing = sorted(ends - known)
        if missing:
            names = ", ".join(map(str, missing[:_MAX_SHOWN])) + (", ..." if len(missing) > _MAX_SHOWN else "")
            extent = f"{present[0]} to {present[-1]}" if present else "none"
            raise NotFoundError(
                f"Episode {names} of {self.text!r} is not in the dataset, which has {len(present)} "
                f"episodes ({extent}).",
                hint="An open end such as '20-' reaches to the last episode, whatever its number.",
            )
        return [
            index
            for index in present
            if any(start <= index and (stop is None or index < stop) for start, stop in self.ranges)
        ]


def parse_episode_spec(text: str) -> EpisodeSpec:
    """Parse comma-separated single episodes ``12``, ranges ``0-9`` (both ends included) and ``20-``.

    Raises:
        UsageError: Anything else, a range that ends before it starts, or an episode named twice.
    """
    ranges: list[tuple[int, int | None]] = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise UsageError(
                f"Episodes {text!r} cannot be understood at {part.strip()!r}.",
                hint="Write single episodes, ranges and an open end, such as 0-9,12,20-.",
            )
        start = int(match[1])
        if match[2] is None:
            ranges.append((start, start + 1))
        elif match[3] is None:
            ranges.append((start, None))
        elif int(match[3]) < start:
            raise UsageError(f"Episodes {text!r}: the range {part.strip()!r} ends before it starts.")
        else:
            ranges.append((start, int(match[3]) + 1))
    ranges.sort(key=lambda item: item[0])
    for (_, stop), (start, _) in pairwise(ranges):
        if stop is None or start < stop:
            raise UsageError(f"Episodes {text!r} name episode {start} twice.", hint="Let ranges not overlap.")
    return EpisodeSpec(text, tuple(ranges))
