"""What a worker commits to: states that follow from each other, whatever happens between leases."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.fault_server import FaultServer

from blocktrain.config import Config
from blocktrain.coordinator.replays import NO_MOMENTS
from blocktrain.data.corpus import Corpus
from blocktrain.model.stack import initial_block
from blocktrain.protocol.messages import (
    Blob,
    Commitment,
    Lease,
    LeaseProgress,
    Reveal,
    RevealOffer,
    UploadState,
)
from blocktrain.storage import tensor_file
from blocktrain.training.device import resolve
from blocktrain.worker.client import Client
from blocktrain.worker.kept_states import KEPT_LEASES, KeptStates, Pace
from blocktrain.worker.local_block import LocalBlock
from blocktrain.worker.transfer import BlobCache, Transfer

CPU = resolve("cpu", "fp32")
STEPS = 3


class OneSegment(Pace):
    def segments(self, steps: int) -> int:
        return 1


class Work:
    """A worker's block, whose leases all start from the first version."""

    def __init__(self, server: FaultServer, client: Client, config: Config, corpus: Corpus,
                 folder: Path) -> None:  # fmt: skip
        client.takes_commitments = True
        transfer = Transfer(client, BlobCache(folder / "chunks"))
        self.kept = KeptStates(client, folder, transfer.bandwidth)
        self.kept.pace = OneSegment()
        self.block = LocalBlock(config, corpus, CPU, transfer, folder, print, self.kept)
        self.client, self.count = client, 0
        weights = {n: p.detach().numpy() for n, p in initial_block(config, 0).named_parameters()}
        self.base: Blob = server.hold(b"".join(tensor_file.encode(weights)))

    def lease(self, continues: str | None = None) -> Lease:
        self.count += 1
        first = STEPS * (self.count - 1)
        return Lease(
            lease=f"lease{self.count:03}", fence=1, block=0, base_version=0, base=self.base,
            first_batch=first, steps=STEPS, schedule_start=first, schedule_stride=1,
            seconds_left=60.0, continues=continues,
        )  # fmt: skip

    def train(self, lease: Lease, *, stop: bool = False, keep: bool = True) -> Commitment | None:
        def on_report(report: LeaseProgress) -> None:
            self.done = report.steps_done

        self.done = 0
        trained = self.block.train(
            lease, self.client.deadline(), on_report, lambda: stop and self.done > 0
        )
        if trained is None or not keep:
            return None
        if self.block.encodes:
            self.block.encode(self.block.learned(trained), final=False)
            self.block.settle(lease, accepted=True)
        else:
            self.block.write(trained)
        return self.block.commitment(lease)


@pytest.fixture
def new_work(
    server: FaultServer, client: Client, config: Config, corpus: Corpus, tmp_path: Path
) -> Callable[..., Work]:
    count = iter(range(9))

    def make(codec: str = "none") -> Work:
        settings = config.with_settings(swarm__codec=codec)
        return Work(server, client, settings, corpus, tmp_path / f"worker-{next(count)}")

    return make


def test_a_lease_begins_with_the_moments_that_the_last_one_ended_with(
    new_work: Callable[..., Work],
):
    work = new_work()
    first, second = work.train(work.lease()), work.train(work.lease())
    assert first and second
    assert first.moments[0] == NO_MOMENTS
    assert second.moments[0] == first.moments[-1] != second.moments[-1]
    assert first.weights[0] == second.weights[0] == work.base.name
    assert len(first.weights) == len(first.moments) == 2


@pytest.mark.parametrize("how", ["interrupted", "lost", "away"])
def test_after_a_lease_without_update_training_goes_back(new_work: Callable[..., Work], how: str):
    """Bit for bit, as if that lease had never been."""
    work, other = new_work(), new_work()
    for each in (work, other):
        each.train(each.lease())
    leases = work.lease(), other.lease()
    if how == "interrupted":
        assert work.train(leases[0], stop=True) is None
    else:
        work.train(leases[0], keep=False)
    if how == "away":
        work.block.put_away()
    assert work.train(work.lease()) == other.train(other.lease())


@pytest.mark.parametrize("codec", ["int8", "sparse"])
def test_with_a_codec_it_names_what_was_learned_and_left_out(
    new_work: Callable[..., Work], codec: str
):
    work = new_work(codec)
    first = work.train(work.lease())
    second = work.train(work.lease(continues=work.block.ended_lease))
    third = work.train(work.lease())
    assert first and second and third
    assert second.weights[0] == first.weights[-1]
    assert third.weights[0] not in (work.base.name, second.weights[-1])  # with the residual
    names = {(each.learned, each.residual) for each in (first, second, third)}
    assert len(names) == 3 and not any(None in pair for pair in names)


def test_states_of_the_last_leases_are_kept(new_work: Callable[..., Work]):
    work = new_work("int8")
    made = [work.train(work.lease()) for _ in range(KEPT_LEASES + 1)]
    work.kept.collect()

    def readable(commitment: Commitment | None) -> bool:
        assert commitment
        return all(
            bool(work.kept.blobs.chunks.has([name]))
            for name in (commitment.weights[-1], commitment.learned)
            if name
        )

    assert [readable(each) for each in made] == [False, *[True] * KEPT_LEASES]


def test_files_that_were_asked_for_stay_until_others_are(new_work: Callable[..., Work]):
    """The server knows no such request, so sending them fails."""
    work = new_work("int8")
    first, *_, last = [work.train(work.lease()) for _ in range(KEPT_LEASES)]
    assert first and last

    def stored(asked: Commitment) -> tuple[bool, ...]:
        work.kept.reveal(Reveal(lease="lease001", files=asked.weights[-1:]))
        for _ in range(KEPT_LEASES):
            work.train(work.lease())
        work.kept.collect()
        return tuple(bool(work.kept.blobs.chunks.has(each.weights[-1:])) for each in (first, last))

    assert stored(first) == (True, False)
    newest = work.train(work.lease())
    assert newest
    assert stored(newest) == (False, False)


def test_that_files_are_gone_is_said_at_once(
    new_work: Callable[..., Work], monkeypatch: pytest.MonkeyPatch
):
    work, sent = new_work("int8"), []
    made = work.train(work.lease())
    assert made

    def receive(lease: str, offer: RevealOffer, deadline: object) -> UploadState:
        sent.append(len(offer.recipes))
        return UploadState(missing=())

    monkeypatch.setattr(work.client, "reveal", receive)
    work.kept.reveal(Reveal(lease="lease001", files=made.weights))
    work.kept.reveal(Reveal(lease="lease001", files=(*made.weights, "0" * 64)))
    assert sent == [len(made.weights), 0]


def test_without_a_coordinator_that_takes_them_there_are_none(new_work: Callable[..., Work]):
    work = new_work()
    work.client.takes_commitments = False
    assert work.train(work.lease()) is None
