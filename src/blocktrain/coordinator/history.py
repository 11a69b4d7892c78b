"""How a run has developed: what its merged updates and scores amount to over time.

Reads the ledger in steps and remembers only sums and thinned curves, so that a long run costs no
more than a short one. Not thread-safe.
"""

import json
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from statistics import fmean

from blocktrain.coordinator.run import Run
from blocktrain.ledger.history_tables import MergedUpdate
from blocktrain.ledger.ledger import Transaction
from blocktrain.protocol.page_messages import LossSource, Measure, Points, Trend

MOST_POINTS = 240  # of a curve
MOST_BUCKETS = 120
MOST_RATES = 40
FIRST_BUCKET = 5.0  # seconds; doubles whenever there are too many
RATE_SECONDS = 600.0  # speeds are means over this long
LEAST_RATE_SECONDS = 20.0
TREND_SHARE = 0.1  # of the run so far: the stretches of time that a trend compares
LEAST_TREND_SECONDS = 60.0
UNTRAINED = "[0]"  # versions of a score of an untrained block
SMOOTHED = 5  # newest values that are averaged
RECENT_UPDATES = 20
LEAST_CURVE = 4  # points with which a better source is preferred
PAGE = 500  # versions or scores per read


class Series:
    """Values over time, of which neighbours are averaged if there are too many."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        self._each, self._open = 1, list[tuple[float, float]]()  # values per point

    def add(self, time: float, value: float) -> None:
        self._open.append((time, value))
        if len(self._open) >= self._each:
            self._points.append(_mean(self._open))
            self._open.clear()
        if len(self._points) >= 2 * MOST_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            self._points = [_mean(list(pair)) for pair in pairs]
            self._each *= 2

    def points(self) -> Points:
        unfinished = [_mean(self._open)] if self._open else []
        return (*self._points, *unfinished)

    def newest(self, source: LossSource) -> Measure | None:
        """The newest value, and how it changes: the mean of the last stretch of time, compared with
        that of the stretch before. What workers report is noisy, so its newest values are
        averaged."""
        points = self.points()
        if not points:
            return None
        time = points[-1][0]
        _, value = _mean(points[-1:] if source == "scores" else points[-SMOOTHED:])
        stretch = max(LEAST_TREND_SECONDS, TREND_SHARE * (time - points[0][0]))
        late = [point for point in points if point[0] > time - stretch]
        early = [p for p in points if time - 2 * stretch < p[0] <= time - stretch]
        trend = None
        if early:
            (now, after), (then, before) = _mean(late), _mean(early)
            trend = Trend(change=after - before, seconds=now - then)
        return Measure(value=value, source=source, time=time, trend=trend)


def _mean(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return fmean(time for time, _ in points), fmean(value for _, value in points)


class Sums:
    """Amounts per stretch of time since the start of the run."""

    def __init__(self, started: float) -> None:
        self.started, self.bucket = started, FIRST_BUCKET
        self._amounts: dict[str, Counter[int]] = defaultdict(Counter)  # by key, by bucket

    def add(self, key: str, time: float, amount: int) -> None:
        place = max(0.0, time - self.started)
        while place >= self.bucket * MOST_BUCKETS:
            self.bucket *= 2
            for name, amounts in self._amounts.items():
                halved: Counter[int] = Counter()
                for index, each in amounts.items():
                    halved[index // 2] += each
                self._amounts[name] = halved
        self._amounts[key][int(place / self.bucket)] += amount

    def rates(self, key: str, now: float) -> Points:
        """Amounts per second until now, by the time at which a few buckets begin."""
        amounts, points = self._amounts.get(key, Counter()), []
        buckets = 1 + int(max(0.0, now - self.started) / self.bucket)
        together = math.ceil(buckets / MOST_RATES)
        for first in range(0, buckets, together):
            begin, wanted = self.started + first * self.bucket, together * self.bucket
            seconds = min(wanted, now - begin)
            if seconds >= 0.5 * wanted or first == 0:
                amount = sum(amounts[first + offset] for offset in range(together))
                points.append((begin, amount / max(1.0, seconds)))
        return tuple(points)

    def totals(self, key: str) -> Points:
        """The sum of all amounts by the end of each bucket that has any."""
        total, points = 0, []
        for index, amount in sorted(self._amounts.get(key, Counter()).items()):
            points.append((self.started + index * self.bucket, float(total)))
            total += amount
            points.append((self.started + (index + 1) * self.bucket, float(total)))
        return tuple(points)


ALL = ""  # key of the sum over all workers


class History:
    def __init__(self, run: Run) -> None:
        self.run = run
        self.tokens_per_step = run.config.train.batch * run.config.model.window
        self._reset()

    def _reset(self) -> None:
        blocks = range(self.run.config.block_count)
        self._versions, self._score = [0 for _ in blocks], 0
        self.scores: dict[int | None, Series] = defaultdict(Series)  # by block; None: the model
        self.checked = [Series() for _ in blocks]
        self.reported = [Series() for _ in blocks]
        self.tokens = Sums(self.run.created)
        self._staleness = [deque[int](maxlen=RECENT_UPDATES) for _ in blocks]
        self._recent: list[tuple[float, int, str, int]] = []  # time, block, worker, tokens

    def read(self, tx: Transaction) -> None:
        """Add what is new in the ledger."""
        for state in tx.blocks.states():
            while (before := self._versions[state.index]) < state.version:
                to = min(before + PAGE, state.version)
                for update in tx.history.merged(state.index, before, to):
                    self._add(state.index, update)
                self._versions[state.index] = to
        while rows := tx.history.scores_after(self._score, PAGE):
            for row in rows:
                if row.block is None or row.versions != UNTRAINED:
                    self.scores[row.block].add(row.time, row.ce)
            self._score = rows[-1].number

    def forget(self) -> None:
        """Read everything again next time, because versions were unmerged."""
        self._reset()

    def _add(self, block: int, update: MergedUpdate) -> None:
        time, tokens = update.committed, update.steps * self.tokens_per_step
        self.tokens.add(ALL, time, tokens)
        self.tokens.add(update.worker, time, tokens)
        if time >= self.run.clock() - RATE_SECONDS:
            self._recent.append((time, block, update.worker, tokens))
        self._staleness[block].append(max(0, update.version - 1 - update.base_version))
        if update.loss is not None and math.isfinite(update.loss):
            self.reported[block].add(time, update.loss)
        hidden = json.loads(update.check or "{}").get("hidden") or {}
        if hidden.get("after") is not None:
            self.checked[block].add(time, hidden["after"])

    def measure(self, block: int) -> Measure | None:
        """The newest loss of a block from the best source that there is."""
        for curve, source in self._sources(block):
            if found := curve.newest(source):
                return found
        return None

    def curve(self, block: int) -> tuple[LossSource, Points]:
        """The loss over time from the best source with enough points, or with the most."""
        curves = [(source, curve.points()) for curve, source in self._sources(block)]
        for source, points in curves:
            if len(points) >= LEAST_CURVE:
                return source, points
        return max(curves, key=lambda each: len(each[1]))

    def _sources(self, block: int) -> tuple[tuple[Series, LossSource], ...]:
        return (
            (self.scores[block], "scores"),
            (self.checked[block], "checks"),
            (self.reported[block], "workers"),
        )

    def staleness(self, block: int) -> float | None:
        behind = self._staleness[block]
        return fmean(behind) if behind else None

    def speeds(self, now: float) -> "TokenRates":
        self._recent = [each for each in self._recent if each[0] >= now - RATE_SECONDS]
        since = max(self.run.created, now - RATE_SECONDS)
        return TokenRates(self._recent, max(LEAST_RATE_SECONDS, now - since))


class TokenRates:
    """Tokens per second in updates that were merged lately."""

    def __init__(self, recent: list[tuple[float, int, str, int]], seconds: float) -> None:
        blocks: Counter[int] = Counter()
        workers: Counter[str] = Counter()
        for _, block, worker, tokens in recent:
            blocks[block] += tokens
            workers[worker] += tokens
        self._rate: Callable[[int], float] = lambda tokens: tokens / seconds
        self._blocks, self._workers = blocks, workers

    @property
    def total(self) -> float:
        return self._rate(self._blocks.total())

    def of_block(self, block: int) -> float:
        return self._rate(self._blocks[block])

    def of_worker(self, worker: str) -> float:
        return self._rate(self._workers[worker])
