"""What is kept of how the blocks stand is what a reader would find."""

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
import sqlalchemy as sql
from blocktrain.ledger.session import StatementSession
from blocktrain.ledger.standing import LedgerSnapshot

from blocktrain.ledger.ledger import Ledger
from blocktrain.ledger.schema import HELD, leases
from blocktrain.ledger.transaction import Transaction
from blocktrain.protocol.messages import Blob
from blocktrain.swarm.state import BlockState

NOW = 1_700_000_000.0
WEIGHTS = Blob(name="a" * 64, size=100)
WORKERS = ["w0", "w1", "w2"]
BATCHES = 300


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    ledger = Ledger(url)
    with ledger.write() as tx:
        for block in range(2):
            tx.create_block(block, BATCHES, WEIGHTS, NOW)
        for name in WORKERS:
            tx.members.add_worker(
                id=name, public_key=name, name=name, device="cpu", role="train", joined=NOW,
                seen=NOW,
            )  # fmt: skip
    yield ledger
    ledger.close()


class Life:
    """Things that happen to leases and updates, one after another, as the dice fall."""

    def __init__(self, seed: int) -> None:
        self.draws = random.Random(seed)
        self.count = 0

    def go_on(self, tx: Transaction) -> None:
        tx.blocks.lock()
        act = self.draws.choice(
            [self.claim, self.claim, self.submit, self.submit, self.train, self.expect,
             self.give_back, self.begin_anew, self.refuse, self.merge]
        )  # fmt: skip
        act(tx)

    def claim(self, tx: Transaction) -> None:
        block = self.draws.randrange(2)
        if not tx.blocks.states()[block].to_hand_out:
            return
        self.count += 1
        text = tx.blocks.take_range(block, self.draws.randint(1, 9))
        tx.leases.add(
            id=f"lease{self.count}", worker=self.draws.choice(WORKERS), block=block,
            base_version=tx.block_version(block), schedule_start=0, schedule_stride=1,
            deadline=NOW + 60, created=NOW + self.count, **text._asdict(),
        )  # fmt: skip

    def submit(self, tx: Transaction) -> None:
        if lease := self._one(tx):
            offered = tx.updates.get(lease.id) or tx.updates.add(
                lease=lease.id, worker=lease.worker, block=lease.block, steps=lease.steps,
                base_version=lease.base_version, offer="{}", signature="", loss=None,
                continues=None,
            )  # fmt: skip
            if self.draws.random() < 0.2:
                tx.leases.move(lease.id, "sending")
                return
            tx.leases.move(lease.id, "submitted")
            tx.updates.accept(offered, lease.base_version, 1.0, NOW + self.count)

    def train(self, tx: Transaction) -> None:
        if lease := self._one(tx):
            tx.leases.mark_trained(lease.id, self.draws.choice(WORKERS))

    def expect(self, tx: Transaction) -> None:
        if lease := self._one(tx):
            tx.leases.set_expected(lease.id, NOW + self.draws.randrange(100))

    def give_back(self, tx: Transaction) -> None:
        lease = self._one(tx)
        if lease and tx.leases.move(lease.id, "returned"):
            tx.blocks.give_back_range(lease.block, lease.first_batch, lease.steps)

    def begin_anew(self, tx: Transaction) -> None:
        tx.leases.reopen_unsent(self.draws.choice(WORKERS))

    def refuse(self, tx: Transaction) -> None:
        for update in tx.blocks.states()[0].pending[:1]:
            tx.updates.refuse(update.lease, "")

    def merge(self, tx: Transaction) -> None:
        state = self.draws.choice(tx.blocks.states())
        if state.pending:
            assert tx.publish(state.index, state.version, WEIGHTS, None, state.pending, NOW)

    def _one(self, tx: Transaction) -> object:
        held = sorted(tx.leases.held(), key=lambda row: str(row.id))
        return self.draws.choice(held) if held else None


def in_order(states: list[BlockState]) -> list[BlockState]:
    return [
        replace(
            state,
            pending=tuple(sorted(state.pending, key=lambda update: update.lease)),
            sending=tuple(sorted(state.sending)),
        )
        for state in states
    ]


def read_anew(tx: Transaction) -> Transaction:
    session = StatementSession(tx.connection, tx._session._prepared)
    return Transaction(session, LedgerSnapshot())


@pytest.mark.parametrize("seed", range(4))
def test_what_is_kept_is_what_would_be_read(ledger: Ledger, seed: int):
    life = Life(seed)
    for _ in range(6):
        with ledger.together():
            for _ in range(30):
                with suppress(KeyError), ledger.write() as tx:
                    tx.blocks.states()
                    life.go_on(tx)
                    if life.draws.random() < 0.2:
                        raise KeyError  # and nothing of it has happened
                with ledger.read() as tx:
                    anew = read_anew(tx)
                    assert in_order(tx.blocks.states()) == in_order(anew.blocks.states())
                    assert [tx.leases.open_of(w) for w in WORKERS] == [
                        anew.leases.open_of(w) for w in WORKERS
                    ]
                    for row in anew.leases.held():
                        assert tuple(tx.leases.get(row.id)) == tuple(row)
                        assert row.state in HELD
    with ledger.read() as tx:
        assert sum(state.version for state in tx.blocks.states()) > 0
        fences = [(row.block, row.fence) for row in tx.connection.execute(sql.select(leases))]
        assert len(set(fences)) == len(fences)
        assert [tx.blocks.get(block).fence for block in range(2)] == [
            sum(of == block for of, _ in fences) for block in range(2)
        ]


def test_what_another_coordinator_did_is_seen_by_the_next_together(url: str, ledger: Ledger):
    other, life = Ledger(url), Life(0)
    with ledger.together(), ledger.write() as tx:
        life.claim(tx)
    with other.together(), other.write() as tx:
        assert sum(state.open_leases for state in tx.blocks.states()) == 1
        life.claim(tx)
        tx.leases.move("lease1", "expired")
    with ledger.together(), ledger.write() as tx:
        assert [lease.id for lease in tx.leases.held()] == ["lease2"]
        assert sum(state.open_leases for state in tx.blocks.states()) == 1
        assert tx.leases.get("lease1").state == "expired"
    other.close()
