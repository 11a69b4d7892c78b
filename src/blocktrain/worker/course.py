"""How one lease is going: how fast, and how long it will still take."""

from blocktrain.worker.clock import Clock


class Course:
    def __init__(self, steps: int, clock: Clock) -> None:
        self.steps, self.steps_done = steps, 0
        self._clock = clock
        self._began: float | None = None
        self.seconds = 0.0  # from the beginning to the last step that is done

    def begin(self) -> None:
        """Training begins now, unless it has: downloads before it do not count."""
        if self._began is None:
            self._began = self._clock.monotonic()

    def reached(self, steps_done: int) -> None:
        self.begin()
        assert self._began is not None
        self.steps_done = steps_done
        self.seconds = self._clock.monotonic() - self._began

    @property
    def steps_per_second(self) -> float | None:
        """None before the first step."""
        return self.steps_done / max(self.seconds, 1e-6) if self.steps_done else None

    def ends_within(self, seconds: float) -> bool:
        speed = self.steps_per_second
        return speed is not None and (self.steps - self.steps_done) / speed <= seconds
