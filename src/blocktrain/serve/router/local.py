"""All blocks in this process, requests decoded together: the ring without a network."""

from collections.abc import Sequence

from blocktrain.errors import MissingPrefixError
from blocktrain.serve.router.decode import Account, Decoding, Request, TraversalCost, new_decoding
from blocktrain.serve.router.front import FirstBlock
from blocktrain.serve.stage.batch import Work
from blocktrain.serve.stage.compute import StageCompute


def run_locally(
    front: FirstBlock, stages: Sequence[StageCompute], requests: Sequence[Request]
) -> list[tuple[bytes, Account]]:
    """Every request's answer and what it cost."""
    window, pace = front.first.config.model.window, TraversalCost()
    decodings = {
        number: new_decoding(each, window, pace, Account()) for number, each in enumerate(requests)
    }
    answers = {number: bytearray() for number in decodings}
    while going := {n: each for n, each in decodings.items() if not each.finished}:
        for row, log_probs_RV in front.answers(_traversed(front, stages, going)):
            answers[row.request] += going[row.request].take(row, log_probs_RV).data
            if going[row.request].finished:
                for compute in (front.first, *stages):
                    compute.release(row.request)
    return [(bytes(answers[number]), each.account) for number, each in decodings.items()]


def _traversed(
    front: FirstBlock, stages: Sequence[StageCompute], decodings: dict[int, Decoding]
) -> Work:
    """One step of each, once around; what a stage has lost is replayed."""
    while True:
        steps = {number: step for number, each in decodings.items() if (step := each.step())}
        try:
            work = front.work(steps)
            for stage in stages:
                if prefills := front.prefills(steps):
                    stage.prefill(prefills)
                work = stage.step(work)
        except MissingPrefixError as missing:
            for number in missing.requests:
                decodings[number].replay()
        else:
            return work
