"""`inspect budget` against what loaders really reserve, and against loops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from lrstream.commands.inspect_budget import BudgetReport, BudgetSettings, _sufficient_gb, inspect_budget
from lrstream.commands.inspect_figures import histogram
from lrstream.commands.inspect_source import InspectedDataset, SourceOptions, open_indexed
from lrstream.demo import WrittenDataset
from lrstream.errors import ByteBudgetError, UsageError
from lrstream.mp4.synthesis import mini_mp4
from lrstream.streaming.dataset import StreamingLeRobotDataset
from tests.support.workers import as_worker

GIB = 2**30


@contextmanager
def opened(dataset: WrittenDataset) -> Iterator[InspectedDataset]:
    with open_indexed(SourceOptions(str(dataset.root))) as found:
        yield found


def report_on(dataset: WrittenDataset, **settings: Any) -> BudgetReport:
    with opened(dataset) as found:
        return inspect_budget(found, BudgetSettings(**settings))


def largest_bytes(dataset: WrittenDataset) -> int:
    return int(report_on(dataset).episode_bytes.largest)


def peak_of_a_run(
    dataset: WrittenDataset,
    *,
    worker: int = 0,
    num_workers: int = 0,
    epoch: int = 0,
    **options: Any,
) -> int:
    """Most bytes that the loader's own cache had reserved at one time in an epoch of one worker."""
    peak = 0
    with (
        StreamingLeRobotDataset(str(dataset.root), return_uint8=True, **options) as loader,
        as_worker(loader, worker, num_workers),
    ):
        loader.set_epoch(epoch)
        for _ in loader:
            peak = max(peak, loader.metrics()["peak_reserved_bytes"])
    return peak


@pytest.mark.parametrize("strategy", ["remaining", "round_robin"])
@pytest.mark.parametrize(
    ("pool", "prefetch", "episodes_in_budget"),
    [(32, 8, 1000), (2, 0, 1000), (2, 1, 1000), (3, 2, 3.1), (32, 8, 2.2), (2, 8, 1.5), (1, 0, 1.0)],
)
def test_the_loader_reserves_exactly_what_was_planned(
    standard_dataset: WrittenDataset,
    strategy: Any,
    pool: int,
    prefetch: int,
    episodes_in_budget: float,
) -> None:
    # A queue of one sample: every decode has ended before the next anchor is scheduled.
    budget_gb = largest_bytes(standard_dataset) * episodes_in_budget / GIB
    report = report_on(
        standard_dataset,
        byte_budget_gb=budget_gb,
        episode_pool_size=pool,
        prefetch_episodes=prefetch,
        decoded_queue_size=1,
        strategy=strategy,
        epoch=3,
    )
    assert len(report.workers) == 1
    peak = peak_of_a_run(
        standard_dataset,
        epoch=3,
        byte_budget_gb=budget_gb,
        episode_pool_size=pool,
        prefetch_episodes=prefetch,
        decoded_queue_size=1,
        sampling_strategy=strategy,
    )
    reservation = report.workers[0].reservation
    assert reservation.peak_reserved_bytes == peak
    assert reservation.peak_pool_bytes <= peak <= reservation.bound_bytes <= report.worker_budget_bytes
    assert report.rank_peak_bytes == peak


@pytest.mark.parametrize("worker", [0, 1])
def test_workers_reserve_what_was_planned_for_them(standard_dataset: WrittenDataset, worker: int) -> None:
    options: dict[str, Any] = {
        "byte_budget_gb": largest_bytes(standard_dataset) * 5 / GIB,
        "episode_pool_size": 2,
    }
    report = report_on(standard_dataset, num_workers=2, prefetch_episodes=1, decoded_queue_size=1, **options)
    assert [item.worker for item in report.workers] == [0, 1]
    peak = peak_of_a_run(
        standard_dataset,
        worker=worker,
        num_workers=2,
        prefetch_episodes=1,
        decoded_queue_size=1,
        **options,
    )
    assert report.workers[worker].reservation.peak_reserved_bytes == peak
    assert report.workers[worker].budget_bytes == int(options["byte_budget_gb"] * GIB) // 2
    assert report.rank_peak_bytes == sum(item.reservation.peak_reserved_bytes for item in report.workers)


@pytest.mark.parametrize("episodes_in_budget", [1000, 3.1])
def test_no_speed_of_decoding_exceeds_the_bound(
    standard_dataset: WrittenDataset, episodes_in_budget: float
) -> None:
    budget_gb = largest_bytes(standard_dataset) * episodes_in_budget / GIB
    options: dict[str, Any] = {"byte_budget_gb": budget_gb, "episode_pool_size": 2, "prefetch_episodes": 1}
    reservation = report_on(standard_dataset, decoded_queue_size=8, **options).workers[0].reservation
    peak = peak_of_a_run(standard_dataset, decoded_queue_size=8, **options)
    assert peak <= reservation.bound_bytes
    if episodes_in_budget == 1000:
        assert peak >= reservation.peak_reserved_bytes


def test_sizes_are_those_of_the_files(tiny_dataset: WrittenDataset) -> None:
    with opened(tiny_dataset) as found:
        report = inspect_budget(found, BudgetSettings())
        sizes = []
        for position in range(len(found.layout.episodes)):
            total = 0
            for key, columns in found.layout.episodes.cameras.items():
                span = found.spans.span(position, key)
                with found.files.use(columns.path(position)) as file:
                    payload = file.source.read(span.start_byte, span.stop_byte)
                    total += len(mini_mp4(file.track, span, payload))
            sizes.append(total)
    assert report.episode_bytes.total == sum(sizes)
    assert [item.size_bytes for item in report.largest] == sorted(sizes, reverse=True)
    assert sum(bar.count for bar in report.histogram) == len(sizes)


def test_the_pool_that_always_fits(standard_dataset: WrittenDataset) -> None:
    with opened(standard_dataset) as found:
        sizes = found.spans.sizes(range(len(found.layout.episodes))).tolist()
        for factor in (1.0, 1.4, 2.0, 3.3, 100.0):
            budget_bytes = int(max(sizes) * factor)
            report = inspect_budget(found, BudgetSettings(byte_budget_gb=budget_bytes / GIB))
            expected = max(
                pool
                for pool in range(len(sizes) + 1)
                if all(sum(chosen) <= budget_bytes for chosen in combinations(sizes, pool))
            )
            assert report.pool_always_fitting == expected, factor


def test_an_oversized_episode_is_told_as_the_loader_tells_it(standard_dataset: WrittenDataset) -> None:
    budget_gb = (largest_bytes(standard_dataset) - 1) / GIB
    report = report_on(standard_dataset, byte_budget_gb=budget_gb)
    assert report.exit_code == 7
    assert report.num_oversized == 1
    assert report.workers == ()
    [finding] = report.findings
    assert (finding.code, finding.severity) == ("byte-budget", "error")
    loader = StreamingLeRobotDataset(str(standard_dataset.root), byte_budget_gb=budget_gb)
    with loader, pytest.raises(ByteBudgetError) as caught:
        next(iter(loader))
    assert caught.value.message == finding.message
    assert caught.value.fields["episode_index"] == finding.episode_index == report.largest[0].episode_index


def test_only_workers_with_oversized_episodes_count(standard_dataset: WrittenDataset) -> None:
    # Fourteen workers share a budget that seven could have used: there are seven episodes.
    largest = largest_bytes(standard_dataset)
    assert report_on(standard_dataset, num_workers=14, byte_budget_gb=7 * largest / GIB).num_oversized == 0
    assert report_on(standard_dataset, num_workers=14, byte_budget_gb=6 * largest / GIB).num_oversized >= 1


def test_advice_can_be_followed(standard_dataset: WrittenDataset) -> None:
    tight = report_on(
        standard_dataset, byte_budget_gb=largest_bytes(standard_dataset) * 2.2 / GIB, episode_pool_size=7
    )
    assert [finding.code for finding in tight.findings] == ["budget-limits-pool"]
    assert tight.recommended_pool == tight.pool_always_fitting >= 1
    followed = report_on(standard_dataset, byte_budget_gb=tight.recommended_gb, episode_pool_size=7)
    assert followed.findings == ()
    assert followed.workers[0].reservation.largest_pool == 7
    # What is named suffices, and is not rounded up to some round number.
    wanted = report_on(standard_dataset, byte_budget_gb=8, episode_pool_size=7).rank_bound_bytes
    assert wanted <= int(tight.recommended_gb * GIB) <= 1.01 * wanted
    smaller = report_on(
        standard_dataset,
        byte_budget_gb=tight.settings.byte_budget_gb,
        episode_pool_size=tight.recommended_pool,
        prefetch_episodes=0,
    )
    assert smaller.findings == ()


def test_settings_that_cannot_work_are_refused(tiny_dataset: WrittenDataset) -> None:
    with pytest.raises(UsageError, match="A rank has no data"):
        report_on(tiny_dataset, world_size=4)


def test_histograms_count_everything() -> None:
    random = np.random.default_rng(0)
    for values in (random.integers(0, 50, 200), np.array([3, 3, 3]), np.array([7]), np.zeros(0, np.int64)):
        bars = histogram(values)
        assert sum(bar.count for bar in bars) == len(values)
        for number, bar in enumerate(bars):
            is_last = number == len(bars) - 1
            inside = [v for v in values.tolist() if bar.start <= v and (v < bar.stop or is_last)]
            assert len(inside) == bar.count


@pytest.mark.parametrize("num_bytes", [1, 999, 107374182, 107374183, 322122547, 322122548, 2**30, 2**40 + 1])
def test_advised_budgets_suffice_as_they_are_written(num_bytes: int) -> None:
    value = _sufficient_gb(num_bytes)
    assert num_bytes <= int(float(f"{value:g}") * GIB) <= max(1.011 * num_bytes, num_bytes + 1)
