"""Whole simulations: no batch is lost or counts twice, and times are as expected."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from tests.support.scenarios import scenario, scenes

from blocktrain.config import load_config
from blocktrain.simulate.report import Report
from blocktrain.simulate.scenario import Scenario, load_scenario
from blocktrain.simulate.simulation import simulate
from blocktrain.simulate.virtual_block import VirtualBlock, VirtualLease
from blocktrain.simulate.virtual_coordinator import BECAME_STALE, VirtualCoordinator
from blocktrain.swarm.assignment import WorkRequest
from blocktrain.training.estimation import estimate

CONFIGS = Path(__file__).parents[3] / "configs"


class Bookkeeper(VirtualCoordinator):
    """Records every batch that was leased and merged."""

    def __init__(self, scene: Scenario) -> None:
        super().__init__(scene.swarm, scene.block_count, scene.train.steps)
        self.leases: list[VirtualLease] = []
        self.merged: list[list[int]] = [[] for _ in self.blocks]

    def claim(
        self, request: WorkRequest, now: float, trained: VirtualLease | None = None
    ) -> VirtualLease | None:
        lease = super().claim(request, now, trained)
        if lease is not None and int(lease.lease) > len(self.leases):
            self.leases.append(lease)
        return lease

    def publish(self, block: VirtualBlock, merged: Sequence[VirtualLease], now: float) -> None:
        super().publish(block, merged, now)
        for lease in merged:
            self.merged[block.index] += batches(lease.first_batch, lease.steps)

    def all_batches(self, block: VirtualBlock) -> list[int]:
        """Every batch of a block: merged, pending, leased, given back or never handed out."""
        leased = [lease for lease in self.leases if lease.block is block and lease.is_active]
        found = [*self.merged[block.index]]
        for lease in (*leased, *block.pending):
            found += batches(lease.first_batch, lease.steps)
        for first_batch, steps in block.gaps.items():
            found += batches(first_batch, steps)
        return found + list(range(block.next_batch, block.total_batches))


def batches(first: int, steps: int) -> list[int]:
    return list(range(first, first + steps))


@settings(deadline=None, max_examples=150)
@given(scenes)
def test_every_batch_is_merged_once_or_still_to_come(drawn: dict[str, Any]):
    scene = scenario(**drawn)
    books = Bookkeeper(scene)
    report = simulate(scene, books)
    for block in books.blocks:
        assert sorted(books.all_batches(block)) == list(range(block.total_batches))
        assert len(books.merged[block.index]) == block.merged_batches
        leased = sum(
            lease.steps for lease in books.leases if lease.block is block and lease.is_active
        )
        pending = sum(lease.steps for lease in block.pending)
        assert block.under_way == block.merged_batches + leased + pending
        assert block.to_hand_out == block.total_batches - block.under_way
    assert report.finished == (sum(report.merged_batches) == report.batches)


@settings(deadline=None, max_examples=50)
@given(scenes)
def test_all_the_time_of_every_worker_is_accounted_for(drawn: dict[str, Any]):
    report = simulate(scenario(**{**drawn, "simulate__join_seconds": 0.0}))
    assert sum(report.utilisation.values()) == pytest.approx(1.0)
    assert report.steps_trained >= sum(report.merged_batches) - 1e-6
    assert 0.0 <= report.virtual_seconds <= drawn["simulate__longest_seconds"]
    over = report.leases_met + report.leases_missed + report.leases_returned
    assert over <= report.leases_given
    assert min(report.participation_by_block) <= report.participation + 1e-9
    assert max(report.participation_by_block) >= report.participation - 1e-9


CHURN = {
    "simulate__workers": 30,
    "simulate__speed_spread": 0.5,
    "simulate__availability": 0.5,
    "simulate__stay_seconds": 50.0,
    "simulate__straggler_share": 0.3,
    "train__steps": 2000,
}


def test_the_same_seed_gives_the_same_run():
    assert simulate(scenario(**CHURN)) == simulate(scenario(**CHURN))


def test_another_seed_gives_another_run():
    first, second = simulate(scenario(**CHURN)), simulate(scenario(**CHURN, simulate__seed=1))
    assert first.virtual_seconds != second.virtual_seconds


# Results of a run


def test_a_worker_alone_meets_every_deadline_and_makes_every_version():
    report = simulate(scenario(simulate__block_megabytes=5.0, simulate__latency_seconds=0.1))
    assert report.finished
    assert report.leases_met == report.leases_given == sum(report.versions)
    assert report.leases_missed == report.leases_returned == 0
    assert report.staleness == {0: report.leases_given}
    assert not report.refused


def test_a_worker_alone_takes_as_long_as_its_training_and_its_transfers():
    """One block of 40 batches at 2 per second: leases of 10 and, once its speed is known, 30. It
    fetches the first version only; later ones are exactly its own updates."""
    alone = {"model__blocks": 1, "simulate__steps_per_second": 2.0}
    assert simulate(scenario(**alone)).virtual_seconds == pytest.approx(20.0, abs=0.5)
    line = {
        "simulate__block_megabytes": 6.0,
        "simulate__down_megabytes": 3.0,
        "simulate__up_megabytes": 1.0,
        "simulate__merge_megabytes": 1e9,
    }
    report = simulate(scenario(**alone, **line))
    assert report.virtual_seconds == pytest.approx(20.0 + 2.0 + 2 * 6.0, abs=0.5)
    assert (report.bytes_down, report.bytes_up) == (6e6, 12e6)


def test_with_momentum_a_version_differs_from_its_only_update_and_is_fetched():
    shared = {"model__blocks": 1, "simulate__block_megabytes": 1.0}
    own = simulate(scenario(**shared))
    added_to = simulate(scenario(**shared, swarm__outer_momentum=0.5))
    assert own.bytes_down == 1e6
    assert added_to.bytes_down == added_to.leases_given * 1e6 > 1e6


def test_workers_of_a_cascade_also_fetch_the_blocks_before():
    four = {"simulate__workers": 4, "simulate__block_megabytes": 0.001, "train__steps": 400}
    plain = simulate(scenario(**four))
    cascade = simulate(scenario(**four, objective__kind="cascade", objective__tail=1))
    assert cascade.bytes_down > plain.bytes_down
    assert cascade.bytes_up == pytest.approx(plain.bytes_up, rel=0.1)


@pytest.mark.parametrize("lead", [0.25, 1.0])
@pytest.mark.parametrize("workers", [1, 4, 30])
def test_with_a_lead_waiting_workers_notice_that_a_block_opens(lead: float, workers: int):
    settings = {"objective__kind": "cascade", "objective__lead": lead, "model__blocks": 4}
    result = simulate(scenario(**settings, model__layers=8, simulate__workers=workers))
    assert result.finished


def test_smaller_updates_need_less_upload_and_the_same_download():
    line = {"simulate__block_megabytes": 4.0, "model__blocks": 1}
    whole, packed = (simulate(scenario(**line, simulate__update_share=s)) for s in (1.0, 0.25))
    assert packed.bytes_up == whole.bytes_up / 4
    assert packed.bytes_down == whole.bytes_down
    assert packed.virtual_seconds < whole.virtual_seconds


@pytest.mark.parametrize(
    ("codec", "times", "down"), [("bf16", 2.0, 1.0), ("int8", 3.97, 0.5), ("sparse", 96.2, 0.2)]
)
def test_with_a_codec_updates_are_smaller_and_versions_are_fetched_as_deltas(
    codec: str, times: float, down: float
):
    line = {"simulate__block_megabytes": 4.0, "model__blocks": 1, "simulate__workers": 4}
    line["train__steps"] = 2000
    whole, packed = (simulate(scenario(**line, swarm__codec=name)) for name in ("none", codec))
    assert whole.bytes_up / whole.leases_met == 4e6
    assert packed.bytes_up / packed.leases_met == pytest.approx(4e6 / times, rel=0.01)
    assert packed.bytes_down < down * whole.bytes_down


def test_deltas_are_fetched_only_if_they_are_smaller_than_the_whole_block():
    block = VirtualBlock(0, 100)
    for share in (0.3, 0.3, 0.5):
        block.publish([], share)
    assert block.share_to_fetch(2, 3) == pytest.approx(0.5)
    assert block.share_to_fetch(1, 3) == pytest.approx(0.8)
    assert block.share_to_fetch(0, 3) == 1.0


def shared_steps(scene: Scenario) -> float:
    """The share of all steps that were trained while another worker had a lease of the block."""
    books = Bookkeeper(scene)
    assert simulate(scene, books).finished
    spans = [(lease.block.index, lease.created, lease.committed) for lease in books.leases]
    shared = sum(
        lease.steps
        for lease, (index, begins, ends) in zip(books.leases, spans, strict=True)
        if sum(i == index and b < ends and e > begins for i, b, e in spans) > 1
    )
    return shared / sum(lease.steps for lease in books.leases)


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize(("workers", "most"), [(2, 0.0), (3, 0.07), (4, 0.02)])
def test_workers_hardly_ever_share_a_block_if_there_are_enough_blocks(
    codec: str, workers: int, most: float
):
    """Only towards the end, when fewer blocks than workers are left. Without a codec no worker
    trains while its update is sent."""
    four = {"model__layers": 4, "model__blocks": 4, "train__steps": 1500, "swarm__codec": codec}
    scene = scenario(**four, simulate__workers=workers, simulate__latency_seconds=0.05)
    assert shared_steps(scene) <= most


def test_equal_workers_are_used_fully():
    report = simulate(scenario(simulate__workers=8, train__steps=20_000))
    assert report.finished
    assert report.utilisation["training"] > 0.99
    assert report.useful_share == pytest.approx(1.0)
    assert report.participation == 1.0
    assert report.virtual_seconds == pytest.approx(2 * 20_000 / 8, rel=0.02)


@pytest.mark.parametrize("seed", range(1, 6))
def test_no_worker_waits_long_for_the_last_lease_of_another(seed: int):
    """Only training takes time, so all waiting is for others: about 1% of the time. If one worker
    took all remaining text, the others would wait for half a minute."""
    blocks = {"model__layers": 4, "model__blocks": 4, "train__steps": 900, "swarm__codec": "int8"}
    report = simulate(
        scenario(**blocks, simulate__workers=6, simulate__speed_spread=0.5, simulate__seed=seed)
    )
    assert report.finished
    assert report.utilisation["waiting"] < 0.016


def test_three_times_the_speed_takes_a_third_of_the_time():
    slow = simulate(scenario(train__steps=4000))
    fast = simulate(scenario(train__steps=4000, simulate__steps_per_second=3.0))
    assert fast.virtual_seconds == pytest.approx(slow.virtual_seconds / 3, rel=0.05)
    assert fast.steps_trained == pytest.approx(slow.steps_trained)


def test_the_text_of_a_straggler_is_trained_by_another_worker():
    """All are fast when leases are sized; then half of them become a hundred times slower."""
    report = simulate(
        scenario(
            simulate__workers=8,
            simulate__straggler_share=0.5,
            simulate__straggler_factor=100.0,
            simulate__straggler_every=50.0,
            simulate__straggler_seconds=1e6,
            train__steps=2000,
        )
    )
    assert report.finished
    assert report.leases_missed >= 1
    assert report.merged_batches == (2000, 2000)
    assert report.useful_share < 1.0


def test_a_run_finishes_though_most_workers_vanish_for_good():
    lost = {"simulate__workers": 20, "simulate__lost_share": 0.9, "simulate__stay_seconds": 100.0}
    report = simulate(scenario(**lost, simulate__goodbye_share=0.0, train__steps=3000))
    assert report.finished
    assert report.leases_missed >= 10
    assert report.utilisation["gone"] > 0.5


def test_a_run_without_workers_stops_at_the_longest_time():
    lost = {"simulate__lost_share": 1.0, "simulate__stay_seconds": 10.0}
    report = simulate(scenario(**lost, train__steps=1000, simulate__longest_seconds=5000.0))
    assert not report.finished
    assert report.virtual_seconds == 5000.0
    assert report.slowest_progress < 1.0


def test_a_worker_that_says_goodbye_gives_its_lease_back():
    leaving = {"simulate__availability": 0.5, "simulate__stay_seconds": 20.0}
    report = simulate(scenario(**leaving, simulate__goodbye_share=1.0, train__steps=200))
    assert report.finished
    assert report.leases_returned > 0
    assert report.leases_missed == 0


def test_availability_is_the_share_of_time_that_workers_are_present():
    there = {"simulate__workers": 300, "simulate__stay_seconds": 50.0, "train__steps": 20_000}
    report = simulate(scenario(**there, swarm__most_stale=1000, simulate__availability=0.4))
    assert 1.0 - report.utilisation["gone"] == pytest.approx(0.4, abs=0.03)


def test_an_update_that_is_too_stale_is_refused_and_its_text_trained_again():
    """Slow workers among fast ones, which make a version every few seconds."""
    stale = {"simulate__workers": 10, "simulate__speed_spread": 1.5, "train__steps": 2000}
    report = simulate(scenario(**stale, swarm__most_stale=0, simulate__latency_seconds=0.01))
    assert report.refused["too many versions behind"] > 0
    assert set(report.staleness) == {0}
    assert report.finished
    patient = simulate(scenario(**stale, swarm__most_stale=1000))
    assert not patient.refused
    assert max(patient.staleness) > 0


def test_an_update_that_becomes_stale_during_a_merge_is_refused_too():
    slow_merges = {"simulate__block_megabytes": 10.0, "simulate__merge_megabytes": 2.0}
    busy = {"simulate__workers": 10, "simulate__speed_spread": 0.5, "train__steps": 500}
    report = simulate(scenario(**slow_merges, **busy, swarm__most_stale=0))
    assert report.refused[BECAME_STALE] > 0
    assert report.finished


def test_more_coordinators_merge_more_blocks_at_once():
    merges = {"simulate__block_megabytes": 10.0, "simulate__merge_megabytes": 2.0}
    busy = {"simulate__workers": 10, "train__steps": 300}
    one = simulate(scenario(**merges, **busy))
    two = simulate(scenario(**merges, **busy, simulate__coordinators=2))
    assert two.virtual_seconds < one.virtual_seconds


def test_samples_cover_the_whole_run():
    report = simulate(scenario(simulate__sample_seconds=7.0))
    times = [sample.seconds for sample in report.samples]
    assert times[:3] == [0.0, 7.0, 14.0]
    assert times[-1] == report.virtual_seconds
    assert report.samples[-1].mean_progress == 1.0
    assert report.samples[-1].updates_merged == sum(report.staleness.values())


def test_a_report_without_versions_has_numbers():
    report: Report = simulate(scenario(simulate__longest_seconds=1.0))
    assert not report.finished
    assert (report.participation, report.mean_staleness) == (1.0, 0.0)
    assert report.seconds_per_version == float("inf")
    assert replace(report, versions=(2, 2)).seconds_per_version == 0.5


def test_ten_thousand_workers_and_a_hundred_thousand_leases_take_seconds():
    scene = scenario(
        model__layers=8,
        model__blocks=8,
        train__steps=370_000,
        swarm__quorum=100,
        swarm__grace_seconds=5.0,
        swarm__most_stale=20,
        simulate__workers=10_000,
        simulate__speed_spread=0.5,
        simulate__network_spread=0.5,
        simulate__latency_seconds=0.1,
        simulate__block_megabytes=1.0,
        simulate__merge_megabytes=5000.0,
        simulate__coordinators=8,
        simulate__availability=0.9,
    )
    began = time.process_time()
    report = simulate(scene)
    assert time.process_time() - began < 15.0
    assert report.finished
    assert report.leases_given > 100_000


@pytest.mark.parametrize("preset", ["demo", "wikitext2-38m-cascade"])
def test_by_default_a_worker_is_as_large_and_as_fast_as_estimated(preset: str):
    config = CONFIGS / f"{preset}.toml"
    needs = estimate(load_config(config))
    on_gpu = load_scenario(config, ["simulate.machine=rtx-4090"])
    assert on_gpu.block_bytes == 4 * needs.parameters_per_block
    assert needs.steps / on_gpu.steps_per_second == pytest.approx(needs.seconds(6.0e13))
    given = load_scenario(config, ["simulate.block_megabytes=2", "simulate.steps_per_second=3"])
    assert (given.block_bytes, given.steps_per_second) == (2e6, 3.0)
