import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.numerics.sampling import Sampling, kept, likeliest, log_softmax, pick, picks

SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.integers(0, 300),
    top_p=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**63 - 1),
)


def distributions(rows: int, seed: int) -> np.ndarray:
    logits = 3.0 * np.random.default_rng(seed).standard_normal((rows, 256))
    return log_softmax(logits.astype(np.float32))


def test_samples_follow_the_distribution():
    log_probs = np.full(256, -np.inf, np.float32)
    log_probs[[3, 77, 200]] = np.log([0.7, 0.2, 0.1])
    sampling = Sampling(1.0, seed=5)
    found = [pick(log_probs, sampling, position) for position in range(3000)]
    for byte, share in ((3, 0.7), (77, 0.2), (200, 0.1)):
        assert abs(found.count(byte) / 3000 - share) < 0.03


@given(
    st.lists(st.tuples(SAMPLINGS, st.integers(0, 10**6)), min_size=1, max_size=8),
    st.integers(0, 99),
)
def test_rows_are_picked_as_each_would_be_alone(rules: list[tuple[Sampling, int]], seed: int):
    log_probs = distributions(len(rules), seed)
    samplings, positions = zip(*rules, strict=True)
    alone = [pick(*each) for each in zip(log_probs, samplings, positions, strict=True)]
    assert picks(log_probs, samplings, positions).tolist() == alone


@given(SAMPLINGS, st.integers(0, 99))
def test_what_is_left_out_is_never_picked_and_greedy_is_the_likeliest(
    sampling: Sampling, seed: int
):
    log_probs = distributions(1, seed)[0]
    byte = pick(log_probs, sampling, 0)
    if sampling.temperature == 0.0:
        assert byte == log_probs.argmax()
    else:
        assert kept(log_probs / sampling.temperature, sampling)[byte]


@given(st.integers(1, 255), st.integers(0, 99))
def test_top_k_leaves_the_k_likeliest(count: int, seed: int):
    log_probs = distributions(1, seed)[0]
    left = np.flatnonzero(kept(log_probs, Sampling(1.0, top_k=count)))
    assert set(left.tolist()) == set(likeliest(log_probs, count))


@given(st.floats(0.01, 0.99), st.integers(0, 99))
def test_top_p_leaves_the_fewest_likeliest_that_hold_the_share(share: float, seed: int):
    probs = np.exp(distributions(1, seed)[0].astype(np.float64))
    probs /= probs.sum()
    left = kept(np.log(probs), Sampling(1.0, top_p=share))
    assert probs[left].min() > probs[~left].max(initial=0.0)
    assert probs[left].sum() >= share - 1e-9
    assert probs[left].sum() - probs[left].min() <= share + 1e-9


def test_of_equals_none_is_left_out_alone():
    flat = np.zeros(256)
    assert kept(flat, Sampling(1.0, top_k=3)).all()
    assert kept(flat, Sampling(1.0, top_p=0.0)).all()


def test_the_likeliest_come_first_with_their_log_probabilities():
    log_probs = distributions(1, 0)[0]
    found = likeliest(log_probs, 5)
    assert list(found) == np.argsort(-log_probs)[:5].tolist()
    assert list(found.values()) == sorted(found.values(), reverse=True)


@given(SAMPLINGS, st.sampled_from([np.nan, np.inf, -np.inf]), st.booleans())
def test_what_is_no_distribution_gives_some_byte_and_changes_no_other(
    sampling: Sampling, bad: float, everywhere: bool
):
    sound = distributions(2, 1)
    broken = sound.copy()
    broken[0, slice(None) if everywhere else 7] = bad
    found = picks(broken, [sampling] * 2, [3, 4])
    assert 0 <= found[0] < 256
    assert found[1] == pick(sound[1], sampling, 4)
