"""Rows that have arrived at a stage and wait to be computed, by request."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from blocktrain.serve.ring.activations import Row
from blocktrain.serve.ring.envelope import StepEnvelope


@dataclass(frozen=True, eq=False)
class WaitingRow:
    """A row, with the step that it belongs to. A prefill belongs to none."""

    row: Row
    step: StepEnvelope | None  # of this row only
    until: float  # when it fails if its context has not arrived

    @property
    def context(self) -> int:
        """Number of positions that may be computed in earlier turns than the others. None of a
        denoising step: its state covers only the positions read, its context is prefilled."""
        if self.step and len(self.step.activations.state) != len(self.row.ids):
            return 0
        return self.row.context

    def cut(self, count: int) -> tuple[Self, Self | None]:
        """The first `count` positions of the context and the rest, or the whole row if its context
        is not longer."""
        if count >= self.context:
            return self, None
        row = self.row
        first = replace(row, ids=row.ids[:count], read=0)
        rest = replace(row, start=row.start + count, ids=row.ids[count:], source=0)
        return self._part(first, slice(0, count), 0), self._part(rest, slice(count, None), None)

    def _part(self, row: Row, positions: slice, reads: int | None) -> Self:
        if self.step is None:
            return replace(self, row=row)
        whole = self.step.activations
        state, readout = whole.state[positions], whole.readout_RV[:reads]
        part = replace(whole, rows=(row,), state=state, readout_RV=readout)
        return replace(self, row=row, step=replace(self.step, activations=part))


class WaitingRows:
    """Rows in order of arrival. A request's rows are computed one after another, each once the
    positions before it are cached."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._rows: dict[int, list[WaitingRow]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def add(self, row: Row, step: StepEnvelope | None, now: float) -> None:
        self._rows.setdefault(row.request, []).append(WaitingRow(row, step, now + self._patience))

    def computable(self, has_context: Callable[[Row], bool]) -> dict[int, WaitingRow]:
        """The next row of each request, the oldest request first. Leaves out requests whose next
        row has not arrived."""
        return {
            request: ready
            for request, rows in self._rows.items()
            if (ready := next((each for each in rows if has_context(each.row)), None))
        }

    def take(self, waiting: WaitingRow, count: int) -> WaitingRow:
        """Remove a row, or the first `count` positions of its context."""
        rows = self._rows[waiting.row.request]
        taken, rest = waiting.cut(count)
        rows[(at := rows.index(waiting)) : at + 1] = [rest] if rest else []
        if not rows:
            del self._rows[waiting.row.request]
        return taken

    def drop(self, requests: Iterable[int]) -> list[WaitingRow]:
        """Remove and return all rows of these requests."""
        return [row for request in requests for row in self._rows.pop(request, [])]

    def overdue(self, requests: Iterable[int], now: float) -> list[int]:
        """Those of these requests that have waited for their context too long."""
        return [each for each in requests if self._rows[each][0].until <= now]

    def __contains__(self, request: int) -> bool:
        return request in self._rows

    def source(self, request: int) -> int:
        """The context that the request's first row copies; 0 if none."""
        return self._rows[request][0].row.source

    def others(self, requests: Iterable[int]) -> Sequence[int]:
        """The requests with rows, without these."""
        return [request for request in self._rows if request not in set(requests)]
