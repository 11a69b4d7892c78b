"""Bytes moved between workers and the run, by worker and block.

What comes up is counted when it was verified. What goes down a coordinator does not see where a
bucket gives it away: workers say it with an update, a score or a lease given back, so it is as
honest as they are, and comes a little later.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from pydantic import TypeAdapter

from blocktrain.errors import RefusedError
from blocktrain.ledger.transaction import Transaction
from blocktrain.protocol.messages import Downloaded, Moved

Key = TypeVar("Key", bound=Hashable)

NOTHING = Moved()
_DOWNLOADS = TypeAdapter(tuple[Downloaded, ...])


def check_downloads(downloads: Iterable[Downloaded], units: int) -> None:
    for told in downloads:
        if told.block >= units:
            raise RefusedError("malformed", f"downloads: there is no block {told.block}")


def downloads_to_json(downloads: Sequence[Downloaded]) -> str | None:
    return _DOWNLOADS.dump_json(tuple(downloads)).decode() if downloads else None


def downloads_from_json(text: str | None) -> tuple[Downloaded, ...]:
    return _DOWNLOADS.validate_json(text) if text else ()


def count_traffic(
    tx: Transaction, worker: str, uploaded: Mapping[int, Moved], downloads: Iterable[Downloaded]
) -> None:
    """Add what a worker uploaded, by block, and what it says it downloaded."""
    downloaded = ((told.block, _moved(told)) for told in downloads)
    for block, moved in sum_traffic(chain(uploaded.items(), downloaded)).items():
        tx.events.count_traffic(worker, block, moved)


def sum_traffic(parts: Iterable[tuple[Key, Moved]]) -> dict[Key, Moved]:
    """All that was moved under the same key, together."""
    sums: dict[Key, Counter[str]] = defaultdict(Counter)
    for key, moved in parts:
        sums[key].update(moved.model_dump())
    return {key: Moved(**counts) for key, counts in sums.items()}


def _moved(told: Downloaded) -> Moved:
    return Moved(down_whole=told.whole, down_differences=told.differences, down_raw=told.raw)
