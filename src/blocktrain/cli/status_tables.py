"""The state of a run as text for a terminal of any size."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NamedTuple

from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from blocktrain.cli.terminal import compute, plain, score, size
from blocktrain.config import Config
from blocktrain.protocol.page_messages import LossSource, Measure, Overview, Trend
from blocktrain.protocol.status_messages import BlockStatus, Status, WorkerState, WorkerStatus

LONGEST_AGE = 1e9  # seconds that are displayed
FRAME_ROWS = 5  # title, header and borders of a table
LEAST_ROWS = 3  # a table with room for fewer rows than this is left out
BORDER, COLUMN_BORDER = 1, 3
LEAST_NAME = 8  # least width of a worker's name
MOST_BAR = 60
# Active workers first, because a short screen shows only the first rows.
STATES = ("training", "checking", "waiting", "paused", "lost", "away", "excluded", "banned")
PRESENT: tuple[WorkerState, ...] = ("training", "checking", "waiting", "paused")
GONE: dict[WorkerState, str] = {
    "lost": "vanished while they trained",
    "away": "left",
    "excluded": "were excluded because of failed checks",
    "banned": "were banned",
}
MOST_NAMES = 3  # of workers that failed
UNCHECKED = "updates are not checked, so a harmful one counts"
SOURCES: dict[LossSource, str] = {
    "scores": "cross entropy on held-out text, nats/byte",
    "checks": "on hidden text, measured by validators, nats/token",
    "workers": "as workers report it, not verified, nats/token",
}
RUNS = {"running": "training", "drained": "drained: no lease is open"}


class Screen(NamedTuple):
    console: Console
    rows: int | None  # None: as many as there are
    shows_all: bool = False  # also workers that have left


@dataclass(frozen=True)
class Columns:
    """The content of a table. If it is too wide, the columns in `optional` are left out, in that
    order. Of the other columns, only `name` may be cut."""

    title: str
    names: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left: tuple[str, ...] = ()  # aligned to the left; the others are numbers
    optional: tuple[str, ...] = ()
    caption: str = ""

    def table(self, width: int, most_rows: int | None) -> Table:
        rows, caption, widths = self.rows, self.caption, self._fitting(width)
        if most_rows is not None and len(rows) > most_rows:
            rows = rows[: max(most_rows - 1, 0)]
            more = f"and {len(self.rows) - len(rows)} more"
            caption = f"{more}; {caption}" if caption else more
        table = Table(title=self.title, title_justify="left", caption=caption or None)
        table.caption_justify = "left"
        for name in widths:
            is_cut = name == "name"
            table.add_column(
                name,
                justify="left" if name in self.left else "right",
                no_wrap=not is_cut,
                min_width=None if is_cut else widths[name],
            )
        for row in rows:
            cells = dict(zip(self.names, row, strict=True))
            # Text from other machines, never parsed as markup.
            texts = (Text(plain(cells[name]), overflow="ellipsis", no_wrap=True) for name in widths)
            table.add_row(*texts)
        return table

    def without(self, name: str) -> "Columns":
        """The same table without one of its columns."""
        place = self.names.index(name)

        def rest(cells: tuple[str, ...]) -> tuple[str, ...]:
            return cells[:place] + cells[place + 1 :]

        optional = tuple(each for each in self.optional if each != name)
        return replace(
            self, names=rest(self.names), rows=list(map(rest, self.rows)), optional=optional
        )

    def _fitting(self, width: int) -> dict[str, int]:
        """The columns that fit, and how wide each must be."""
        columns = zip(self.names, *self.rows, strict=True)
        widths = {name: max(map(len, (name, *cells))) for name, *cells in columns}
        if "name" in widths:
            widths["name"] = min(widths["name"], LEAST_NAME)
        for name in self.optional:
            if BORDER + sum(COLUMN_BORDER + each for each in widths.values()) > width:
                del widths[name]
        return widths


def render(status: Status, overview: Overview | None, config: Config, screen: Screen) -> Group:
    """All tables, or what fits into the screen."""
    width = screen.console.width
    head = Text("\n".join([*_head(status, overview, config), _compute(status, config)]))
    bar = ProgressBar(total=1.0, completed=_progress(status), width=min(width, MOST_BAR))
    parts: list[Text | Table | ProgressBar] = [bar, Text(""), head]
    rows = screen.rows
    free = None if rows is None else rows - 1 - len(head.wrap(screen.console, width))
    for columns in (
        _blocks(status, overview),
        _workers(status, screen.shows_all),
        _traffic(status),
    ):
        frame = FRAME_ROWS + bool(columns.caption) * math.ceil(len(columns.caption) / width)
        room = None if free is None else free - frame
        if room is not None and room < min(len(columns.rows), LEAST_ROWS):
            break
        table = columns.table(width, room)
        parts.append(table)
        if free is not None:
            free -= frame + table.row_count + (table.row_count < len(columns.rows))
    return Group(*parts)


def _progress(status: Status) -> float:
    return sum(block.progress for block in status.blocks) / len(status.blocks)


def _head(status: Status, overview: Overview | None, config: Config) -> list[str]:
    """How far the run is and how fast; its score; its workers and checks."""
    since = "after" if status.state == "finished" else "for"
    age = f"{since} {timedelta(seconds=int(_displayed(status.seconds)))}"
    done = f"{100 * _progress(status):.1f}% done"
    if overview is None:  # from an older coordinator
        ce = f"CE: {plain(status.ce_note)}"
        if status.ce is not None:
            ce = f"CE {score(status.ce, config.vocabulary.bytes_per_token)}"
        return [f"run {status.run}: {status.state} {age}, {done}", ce, _checking(status)]
    title = plain(overview.title) if overview.title else f"run {status.run}"
    state = RUNS.get(overview.state, overview.state)
    first = [f"{title}: {state} {age}, {done}"]
    if overview.state == "running":
        first.append(_time_left(overview))
    if overview.state != "finished":
        first.append(f"{_count(overview.tokens_per_second)} tokens/s")
    return [", ".join(first), _score(status, overview), _who(overview), _checking(status)]


def _time_left(overview: Overview) -> str:
    if overview.seconds_left is None:
        return "time left unknown until updates are merged"
    return f"about {_age(overview.seconds_left)} left"


def _score(status: Status, overview: Overview) -> str:
    if overview.score is None:
        return f"score: {plain(overview.score_note)}"
    parts = [f"score {score(overview.score.value, overview.bytes_per_token)}"]
    parts.append(f"{_age(overview.time - overview.score.time)} ago")
    if overview.score.trend:
        parts.append(_trend(overview.score.trend))
    if overview.reference is not None:
        parts.append(f"reference {overview.reference:.4f}")
    return ", ".join(parts)


def about_run(overview: Overview) -> str:
    """A run in one line, for its workers."""
    parts = [f"run: {100 * overview.progress:.1f}% done"]
    if overview.state == "running":
        parts += [_time_left(overview), f"{_count(overview.tokens_per_second)} tokens/s"]
    else:
        parts.append(overview.state)
    if overview.score:
        trend = f" ({_trend(overview.score.trend)})" if overview.score.trend else ""
        parts.append(f"score {overview.score.value:.4f} nats/byte{trend}")
    return ", ".join([*parts, f"{overview.present} workers"])


def _who(overview: Overview) -> str:
    workers = overview.workers
    share = f" ({100 * overview.waiting / overview.present:.0f}%)" if overview.present else ""
    return (
        f"workers here: {overview.present}, of which {workers.get('training', 0)} train,"
        f" {overview.waiting} wait{share}, {workers.get('checking', 0)} check"
    )


def _checking(status: Status) -> str:
    """One line on the checks of updates, and what they cost."""
    if (checking := status.checking) is None:
        return UNCHECKED
    share = "" if checking.share is None else f"{100 * checking.share:.1f}% of the training time, "
    validators = f"{checking.validators} validator{'s' * (checking.validators != 1)}"
    waiting = f"{validators}, {checking.waiting} updates wait"
    note = f"; {plain(checking.note)}" if checking.note else ""
    return f"checks: {share}{waiting}{note}"


def _compute(status: Status, config: Config) -> str:
    known = status.blocks[: config.block_count]  # an untrusted coordinator may list more
    steps = [round(min(max(0.0, b.progress), 1.0) * config.train.steps) for b in known]
    return f"compute: {compute(config, steps)}"


# Blocks


def _blocks(status: Status, overview: Overview | None) -> Columns:
    shown = {block.index: block for block in overview.blocks} if overview else {}
    losses = [
        shown[block.index].loss if block.index in shown else _scored(block)
        for block in status.blocks
    ]
    rows = [
        (
            str(block.index),
            f"{100 * block.progress:.1f}%",
            str(block.version),
            f"{loss.value:.4f}" if loss else "none yet",
            _trend(loss.trend) if loss and loss.trend else "too early",
            str(block.replicas),
            _count(shown[block.index].tokens_per_second) if block.index in shown else "unknown",
            _behind(shown[block.index].staleness) if block.index in shown else "unknown",
            "none ended" if block.participation is None else f"{100 * block.participation:.0f}%",
            str(block.steps_lost),
        )
        for block, loss in zip(status.blocks, losses, strict=True)
    ]
    names = (
        "block", "done", "version", "loss", "trend", "workers", "tokens/s", "versions late",
        "in time", "steps lost",
    )  # fmt: skip
    sources = dict.fromkeys(SOURCES[loss.source] for loss in losses if loss)
    caption = f"loss: {'; '.join(sources)}" if sources else "no update has been merged yet"
    optional = ("steps lost", "in time", "versions late", "trend", "tokens/s")
    return Columns("blocks", names, rows, optional=optional, caption=caption)


def _scored(block: BlockStatus) -> Measure | None:
    return (
        None if block.ce is None else Measure(value=block.ce, source="scores", time=0.0, trend=None)
    )


def _behind(staleness: float | None) -> str:
    return "no update" if staleness is None else f"{staleness:.1f}"


# Workers


def _workers(status: Status, shows_all: bool) -> Columns:
    """Workers that are here, and a line about those that left or failed."""
    here = [each for each in status.workers if shows_all or each.state in PRESENT]
    rows = [
        (
            worker.worker,
            worker.name,
            worker.device,
            worker.state,
            "" if worker.block is None else str(worker.block),
            _lease(worker),
            str(worker.updates),
            size(worker.bytes_trained),
            str(worker.trust.refused) if worker.trust else "0",
            f"{_age(worker.seconds_since_seen)} ago",
        )
        for worker in sorted(here, key=lambda worker: STATES.index(worker.state))
    ]
    names = (
        "worker", "name", "device", "does", "block", "lease", "updates", "trained", "refused",
        "seen",
    )  # fmt: skip
    columns = Columns(
        "workers",
        names,
        rows,
        left=("worker", "name", "device", "does", "block", "lease", "seen"),
        optional=("device", "lease", "trained", "refused", "updates", "seen", "block"),
        caption="" if shows_all else _gone(status.workers),
    )
    return columns if status.checking else columns.without("refused")


def _lease(worker: WorkerStatus) -> str:
    """What a worker is doing: how many steps, and until when."""
    if worker.lease_steps is None or worker.seconds_left is None:
        return "none"
    due = f"due in {_age(worker.seconds_left)}" if worker.seconds_left > 0 else "late"
    return f"{worker.lease_steps} steps, {due}"


def _gone(workers: Sequence[WorkerStatus]) -> str:
    """Workers that are not listed, by what became of them, and the names of some that failed."""
    groups = {state: [each.name for each in workers if each.state == state] for state in GONE}
    parts = [
        f"{len(names)} {GONE[state]}{_some(state, names)}"
        for state, names in groups.items()
        if names
    ]
    return f"not listed: {', '.join(parts)}; --all lists them" if parts else ""


def _some(state: WorkerState, names: Sequence[str]) -> str:
    if state == "away":
        return ""
    more = ", ..." if len(names) > MOST_NAMES else ""
    return f" ({', '.join(map(plain, names[:MOST_NAMES]))}{more})"


# Traffic


def _traffic(status: Status) -> Columns:
    """Bytes by block and by worker, and the factor by which whole fp32 files would be larger."""
    names = [worker.name for worker in status.workers]
    moved_by = [(f"block {block.index}", block.moved) for block in status.blocks]
    moved_by += [
        (worker.name if names.count(worker.name) == 1 else worker.worker, worker.moved)
        for worker in status.workers
        if worker.moved.up_raw + worker.moved.down_raw
    ]
    rows = []
    for name, moved in moved_by:
        ways = (moved.up, moved.down_whole, moved.down_differences)
        smaller = (moved.up_raw + moved.down_raw) / max(sum(ways), 1)
        rows.append((name, *map(size, ways), f"{smaller:.1f}x" if sum(ways) else "nothing yet"))
    columns = ("name", "updates up", "versions down", "as deltas", "fp32 would be")
    title = f"bytes moved, codec {status.codec}"
    return Columns(title, columns, rows, left=("name",), optional=("fp32 would be",))


# Numbers


UNITS: Mapping[str, float] = {"B": 1e9, "M": 1e6, "k": 1e3}


def _count(value: float) -> str:
    for unit, amount in UNITS.items():
        if value >= amount:
            return f"{value / amount:.3g} {unit}"
    return f"{value:.3g}"


def _trend(trend: Trend) -> str:
    return f"{trend.change:+.4f} in {_age(trend.seconds)}"


def _displayed(seconds: float) -> float:
    return min(max(0.0, seconds), LONGEST_AGE)


def _age(seconds: float) -> str:
    seconds = _displayed(seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
