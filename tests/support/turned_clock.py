"""A clock that only moves when somebody sleeps or turns it."""

from blocktrain.worker.timing import Clock


class TurnedClock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self.slept: list[float] = []

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.now, lambda: self.now, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
