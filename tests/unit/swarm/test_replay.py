"""Where a lease is cut, and which differences are those of rounding."""

import pytest

from blocktrain.protocol.check_messages import ReplayResult
from blocktrain.swarm import replay, reputation
from blocktrain.swarm.reputation import Reputation


def found(cosine: float | None = 1.0, distance: float = 0.0, moments: float = 0.0, fault: str = ""):
    return ReplayResult(
        identical=False, cosine=cosine, distance=distance, moments_distance=moments, fault=fault
    )


def test_the_segments_of_a_lease_have_its_steps():
    assert replay.cuts(7, 3) == [0, 2, 4, 7]
    assert replay.cuts(2, 1) == [0, 2]


@pytest.mark.parametrize(
    ("steps", "lease_seconds", "state_seconds", "segments"),
    [(100, 1000.0, 0.1, 4), (100, 10.0, 0.05, 3), (100, 10.0, 5.0, 1), (2, 1000.0, 0.1, 2)],
)
def test_naming_states_takes_a_small_share_of_the_time(
    steps: int, lease_seconds: float, state_seconds: float, segments: int
):
    assert replay.affordable_segments(steps, lease_seconds, state_seconds) == segments
    if segments > 1:
        assert (segments + 1) * state_seconds <= replay.NAMING_SHARE * lease_seconds


def test_rounding_is_no_disagreement_and_anything_more_is():
    assert not replay.disagreement(found(distance=0.001, moments=0.001), "fp32")
    assert "cosine 0.990" in replay.disagreement(found(cosine=0.99), "fp32")
    assert replay.disagreement(found(distance=0.01), "fp32")
    assert replay.disagreement(found(moments=0.01), "fp32")
    assert not replay.disagreement(found(cosine=0.999, distance=0.05, moments=0.05), "auto")
    assert replay.disagreement(found(distance=0.5), "auto")
    assert replay.disagreement(found(cosine=0.5), "bf16")
    assert replay.disagreement(found(cosine=None), "bf16")
    assert replay.disagreement(found(fault="a link"), "bf16") == "a link"


def test_noise_is_compared_on_devices_of_one_kind_only():
    assert replay.comparable("cpu, 2 threads, fp32", "cpu, 8 threads, bf16", draws_noise=True)
    assert not replay.comparable("cpu, 2 threads, fp32", "NVIDIA L4, bf16", draws_noise=True)
    assert replay.comparable("cpu, 2 threads, fp32", "NVIDIA L4, bf16", draws_noise=False)


def test_who_is_replayed_how_often():
    new, established = Reputation(), Reputation(accepted=20, replayed=3)
    assert reputation.replay_probability(new) == 1.0
    assert reputation.replay_probability(Reputation(accepted=2)) == 0.25
    assert reputation.replay_probability(Reputation(accepted=100)) == 0.25  # never replayed so far
    assert reputation.replay_probability(established) == 0.05
    assert reputation.replay_probability(established.suspected(3.0)) == 1.0


def test_a_replay_clears_a_worker_whose_honest_update_was_refused():
    refused = Reputation().after_refused(reputation.REFUSED)
    assert refused.after_replay(agrees=True, was_refused=True).suspicion == 0.0
    assert refused.after_replay(agrees=False, was_refused=True).excluded
    assert not refused.excluded
