"""How far a worker is trusted, by what the checks of its updates have found.

Pure decisions: no clock, no files. `suspicion` sums up evidence: a log likelihood ratio of "this
worker is dishonest" to "it is honest", which is never below 0, so that good work in the past buys
nothing (a CUSUM test). `unexplained` sums up what a worker has hidden from replays. Scores do not
lower it, since a backdoor scores well; only replays that agree do. A worker is excluded once both
together reach EXCLUDED. Until many of its updates have passed, a worker is a newcomer: its updates
weigh less, and more of them are replayed.
"""

from dataclasses import dataclass, replace
from typing import Protocol

EXCLUDED = 10.0
NEWCOMER_UPDATES, NEWCOMER_REPLAYS = 20, 3
NEWCOMER_WEIGHT = 0.25

# Evidence of a refused update, if a replay does not show that it was trained honestly.
REFUSED = 3.0
# Of an update that is only larger than the block's last ones: hostile workers that send small ones
# could otherwise have honest workers excluded.
UNUSUAL = 0.0
REPLAY_DIFFERS, REPLAY_AGREES = EXCLUDED, -2.0  # no honest result differs by more than rounding
# Added to `unexplained` if a lease that was drawn for a replay names no states, if the files do not
# arrive, or if its optimizer began in an unknown state; and after a replay that agrees.
UNEXPLAINED, EXPLAINED = 3.0, -1.0
MOST_OWING = 8  # leases after one whose files a worker still has to send
OVERRULED, CONFIRMED = 5.0, -0.5  # evidence against a validator when others have checked the same

# The probability of a replay: of the first updates, of a newcomer's, of all others.
FIRST_UPDATES, FIRST_REPLAYED, NEWCOMER_REPLAYED, REPLAYED = 2, 1.0, 0.25, 0.05
SUSPECTED = 3.0  # from this suspicion on, every update is replayed
MOST_DOUBLINGS = 6  # of the pause after refused updates, which begins at one lease time


class Standing(Protocol):
    """What the checks have found about a worker; the fields are those of its row in the ledger."""

    @property
    def accepted(self) -> int: ...
    @property
    def refused(self) -> int: ...
    @property
    def refused_in_a_row(self) -> int: ...
    @property
    def replayed(self) -> int: ...
    @property
    def suspicion(self) -> float: ...
    @property
    def unexplained(self) -> float: ...
    @property
    def excluded(self) -> bool: ...


@dataclass(frozen=True)
class Reputation:
    """A worker's standing as a value, to compute the next one."""

    accepted: int = 0
    refused: int = 0
    refused_in_a_row: int = 0
    replayed: int = 0
    suspicion: float = 0.0
    unexplained: float = 0.0
    excluded: bool = False

    @staticmethod
    def of(standing: Standing) -> "Reputation":
        return Reputation(
            standing.accepted,
            standing.refused,
            standing.refused_in_a_row,
            standing.replayed,
            standing.suspicion,
            standing.unexplained,
            standing.excluded,
        )

    def after_accepted(self, evidence: float) -> "Reputation":
        passed = replace(self, accepted=self.accepted + 1, refused_in_a_row=0)
        return passed.suspected(evidence)

    def after_refused(self, evidence: float) -> "Reputation":
        failed = replace(self, refused=self.refused + 1, refused_in_a_row=self.refused_in_a_row + 1)
        return failed.suspected(evidence)

    def after_replay(self, *, agrees: bool, was_refused: bool) -> "Reputation":
        """`was_refused`: a score had refused the update. If it was trained honestly, that is
        forgiven."""
        if not agrees:
            return self.suspected(REPLAY_DIFFERS)
        replayed = replace(self, replayed=self.replayed + 1)
        return replayed.suspected(REPLAY_AGREES - REFUSED * was_refused, EXPLAINED)

    def after_no_replay(self) -> "Reputation":
        """A replay was impossible because of something that the worker did."""
        return self.suspected(unexplained=UNEXPLAINED)

    def suspected(self, evidence: float = 0.0, unexplained: float = 0.0) -> "Reputation":
        sums = replace(
            self,
            suspicion=max(0.0, self.suspicion + evidence),
            unexplained=max(0.0, self.unexplained + unexplained),
        )
        return replace(sums, excluded=self.excluded or distrust(sums) >= EXCLUDED)


def distrust(standing: Standing) -> float:
    """What speaks against a worker."""
    return standing.suspicion + standing.unexplained


def is_newcomer(standing: Standing) -> bool:
    return standing.accepted < NEWCOMER_UPDATES or standing.replayed < NEWCOMER_REPLAYS


def merge_weight(standing: Standing) -> float:
    """The factor of a worker's updates in a mean. Equal factors cancel, so it changes nothing in a
    run of newcomers only."""
    return NEWCOMER_WEIGHT if is_newcomer(standing) else 1.0


def replay_probability(standing: Standing) -> float:
    is_first = standing.accepted + standing.refused < FIRST_UPDATES
    if is_first or distrust(standing) >= SUSPECTED:
        return FIRST_REPLAYED
    return NEWCOMER_REPLAYED if is_newcomer(standing) else REPLAYED


def pause_seconds(refused_in_a_row: int, lease_seconds: float) -> float:
    """How long a worker gets no lease after an update was refused."""
    if refused_in_a_row == 0:
        return 0.0
    return lease_seconds * 2.0 ** min(refused_in_a_row - 1, MOST_DOUBLINGS)


def at_joining(joined: int, lost: int) -> Reputation:
    """The reputation of a new worker, from that of its invite: of the `joined` workers that used
    it, `lost` were excluded or banned. So an excluded worker gains little by joining again with
    another key."""
    return Reputation(refused_in_a_row=lost, suspicion=EXCLUDED * lost / (joined + 2))
