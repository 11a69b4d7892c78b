"""A worker that follows an attack plan, built from the real one.

It joins, leases, signs and sends like every worker. Only the block that it trains differs: what it
hands over to be sent is what the plan says. As a process:

    python -m tests.support.hostile_worker INVITE --plan sign-flip --folder DIR [--seed N]
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import click
import torch
from tests.support.attacks import HISTORY, PLANS, Plan, ShiftedLabels, Turn, difference, poisoned

from blocktrain.config import Config
from blocktrain.data.corpus import Bytes, Corpus
from blocktrain.errors import BlocktrainError
from blocktrain.protocol.identity import WorkerKey
from blocktrain.protocol.invite import Invite
from blocktrain.protocol.messages import Lease, LeaseProgress, Recipe
from blocktrain.storage import tensor_file
from blocktrain.storage.tensor_file import Tensors
from blocktrain.swarm.bounds import lease_rates
from blocktrain.training.device import Compute
from blocktrain.training.frozen import Published
from blocktrain.training.objective import Batch, Loss, Objective
from blocktrain.training.trainer import BlockTrainer
from blocktrain.worker.agent import Agent, WorkerSettings
from blocktrain.worker.client import Client
from blocktrain.worker.kept_states import KeptStates
from blocktrain.worker.lease_trainer import LeaseTrainer
from blocktrain.worker.local_block import LearnedDelta, LocalBlock, TrainedLease
from blocktrain.worker.machine import Deadline
from blocktrain.worker.transfer import Transfer

MOST_VERSIONS = HISTORY + 1  # that a block remembers
CLAIMED_LOSS = 2.0  # of leases that were not trained


class HostileBlock(LocalBlock):
    """Starts every lease from the version that it names, and hands over what the plan says."""

    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        compute: Compute,
        transfer: Transfer,
        scratch: Path,
        on_astray: Callable[[str], None],
        kept: KeptStates | None,
        new_plan: Callable[[], Plan],
    ) -> None:
        plan = new_plan()
        text = poisoned(corpus, plan, config.model.window)
        shown = kept if plan.commits else None
        super().__init__(config, text, compute, transfer, scratch, on_astray, shown)
        self._parts = (config, text, compute, scratch)
        self._new_plan = new_plan
        self._plans: dict[int, Plan] = {}  # by block
        self._bases: dict[int, dict[int, Tensors]] = {}  # by block and version, the newest few
        self._last_block: int | None = None
        self.sent = 0  # updates that were altered

    @property
    def index(self) -> int | None:
        return self._last_block

    @property
    def ended_lease(self) -> None:
        """It never continues a lease, because what it sent is not what it trained."""
        return None

    def plan(self, block: int) -> Plan:
        return self._plans.setdefault(block, self._new_plan())

    def train(
        self,
        lease: Lease,
        deadline: Deadline,
        on_report: Callable[[LeaseProgress], None],
        should_stop: Callable[[], bool],
        ends_early: Callable[[], bool] = lambda: False,
    ) -> TrainedLease | None:
        self.put_away()  # so that the block is loaded again, from the lease's base
        self._last_block = lease.block
        plan = self.plan(lease.block)
        if plan.trains:
            trained = super().train(lease, deadline, on_report, should_stop, ends_early)
        else:
            data = self.versions.read(lease.block, lease.base_version, lease.base, deadline)
            base = tensor_file.decode(data)
            on_report(LeaseProgress(fence=lease.fence, steps_done=lease.steps, loss=CLAIMED_LOSS))
            trained = TrainedLease(base, CLAIMED_LOSS, lease.steps, lease, base)
        return trained and self._altered(trained, plan)

    def encode(self, learned: LearnedDelta, *, final: bool) -> Recipe:
        """As a final update, which may contain more."""
        return super().encode(learned, final=True)

    def settle(self, lease: Lease, *, accepted: bool | None) -> None:
        """Nothing that was left out is sent later."""
        super().settle(lease, accepted=False)

    def _altered(self, trained: TrainedLease, plan: Plan) -> TrainedLease:
        lease, base = trained.lease, {n: array.copy() for n, array in trained.start.items()}
        bases = {**self._bases.get(lease.block, {}), lease.base_version: base}
        self._bases[lease.block] = bases = dict(list(bases.items())[-MOST_VERSIONS:])
        merged = tuple(difference(new, old) for old, new in pairwise(bases.values()))
        config = self._parts[0]
        rates = lease_rates(config.train, lease)
        turn = Turn(config, rates, base, dict(trained.weights), merged)
        change = plan.change(turn)
        self.sent += 1
        return replace(trained, weights={name: base[name] + change[name] for name in base})

    def _trainer_of(self, block: int) -> LeaseTrainer:
        if isinstance(self._plans[block], ShiftedLabels):
            config, text, compute, scratch = self._parts
            self._trainer = self._trainer or MislabelingTrainer(
                config, block, text, compute, scratch
            )
        return super()._trainer_of(block)


class MislabelingTrainer(LeaseTrainer):
    def _new_trainer(self, published: Published | None) -> BlockTrainer:
        trainer = super()._new_trainer(published)
        trainer.objective = Mislabeled(trainer.objective)
        return trainer


class Mislabeled:
    """An objective whose targets are one token late."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective

    def prepare(self, targets: Bytes, seed: int) -> Batch:
        batch = self._objective.prepare(targets, seed)
        return batch._replace(targets_BT=torch.roll(batch.targets_BT, -1, 1))

    def loss(self, module: torch.nn.Module, batch: Batch) -> Loss:
        return self._objective.loss(module, batch)


class HostileAgent(Agent):
    def __init__(self, *arguments: object, plan: str, seed: int) -> None:
        super().__init__(*arguments)
        self._new_plan = lambda: PLANS[plan](seed)

    def new_block(
        self,
        config: Config,
        corpus: Corpus,
        compute: Compute,
        scratch: Path,
        kept: KeptStates | None,
    ) -> LocalBlock:
        def ignore(text: str) -> None:
            pass

        return HostileBlock(
            config, corpus, compute, self._transfer, scratch, ignore, kept, self._new_plan
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("invite")
    parser.add_argument("--plan", choices=PLANS, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--name", default="hostile")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    invite = Invite.decode(args.invite)
    client = Client(invite, WorkerKey.load_or_create(args.folder / "key.pem"))
    settings = WorkerSettings(folder=args.folder, device="cpu", name=args.name)

    def show(event: object) -> None:
        click.echo(json.dumps(asdict(event)))

    try:
        HostileAgent(client, settings, show, plan=args.plan, seed=args.seed).run()
    except BlocktrainError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
