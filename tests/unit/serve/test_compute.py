from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.models import awake_stack
from tests.support.serving import CPU, all_log_probs, of_kind, stage

from blocktrain.config import Config
from blocktrain.errors import CacheFullError, MissingPrefixError, ProtocolError
from blocktrain.model.stack import Stack, product
from blocktrain.serve.ring.activations import Activations, Choice, Row, joined, split_rows
from blocktrain.serve.ring.batch import RowSpan, SlotLimits, SlotOwner, grouped_by_length
from blocktrain.serve.ring.compute import BlockSource, StageCompute
from blocktrain.storage.block_dir import Snapshot
from blocktrain.storage.run_dir import RunDir

KINDS = ("denoise", "cascade")
ALL = Choice(top=256)


def ids(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8).astype(np.uint16)


def rows(*texts: bytes, read: int = 1) -> list[Row]:
    return [Row(number, 0, ids(text), read, ALL) for number, text in enumerate(texts)]


@pytest.fixture(params=KINDS)
def stack(request: pytest.FixtureRequest, config: Config) -> Stack:
    return awake_stack(of_kind(config, request.param))


def split_up(stack: Stack) -> list[StageCompute]:
    return [stage(stack, range(1)), stage(stack, range(1, 3))]


def through(stages: list[StageCompute], work: Activations) -> np.ndarray:
    """Log-probabilities of all bytes."""
    for each in stages:
        work = each.step(work)
    return all_log_probs(work)


def test_ragged_rows_give_each_the_result_of_the_whole_model_alone(stack: Stack):
    texts = [b"a", b"bcd", b"a longer one than those", b"efgh"]
    together = through(split_up(stack), Activations(rows(*texts)))
    for number, text in enumerate(texts):
        alone = through(split_up(stack), Activations(rows(text)))
        assert np.allclose(together[number], alone[0], atol=1e-4)
        whole = product(stack.log_probs(torch.tensor([list(text)])))[0, -1]
        assert np.allclose(together[number], whole, atol=1e-5)


def test_a_row_rolls_back_the_positions_from_its_start_on(stack: Stack):
    stages = split_up(stack)
    through(stages, Activations(rows(b"abcdXYZ", read=4)))
    again = through(stages, Activations([Row(0, 4, ids(b"efg"), 2, ALL)]))
    fresh = through(split_up(stack), Activations(rows(b"abcdefg", read=2)))
    assert np.allclose(again, fresh, atol=1e-4)
    assert [each.cached(0) for each in stages] == [7, 7]


def test_a_prefilled_stage_needs_only_the_positions_read(config: Config):
    stack = awake_stack(of_kind(config, "denoise"))
    stages = split_up(stack)
    for each in stages:
        each.prefill([Row(0, 0, ids(b"abcd"), 0), Row(1, 0, ids(b"x"), 0)])
    work = Activations([Row(0, 4, ids(b"ef"), 2, ALL), Row(1, 1, ids(b"yz"), 1, ALL)])
    between = stages[0].step(work)
    assert len(between.state) == 3
    found = through(stages[1:], between)
    fresh = [through(split_up(stack), Activations(rows(b"abcdef", read=2))),
             through(split_up(stack), Activations(rows(b"xyz")))]  # fmt: skip
    assert np.allclose(found, np.concatenate(fresh), atol=1e-4)


def test_works_join_and_come_apart(stack: Stack):
    first = stage(stack, range(1))
    work = first.step(Activations(rows(b"abc", b"defgh", read=2)))
    parts = split_rows(work, [first.carried(row) for row in work.rows])
    assert [part.rows[0].request for part in parts] == [0, 1]
    assert np.array_equal(joined(parts).state, work.state)
    assert np.array_equal(joined(parts).readout_RV, work.readout_RV)


def test_in_a_refined_row_each_block_reads_the_guesses_of_the_one_before(config: Config):
    """Greedy, two stages of which one has two blocks: against the same by hand."""
    stack = awake_stack(of_kind(config, "denoise"))
    text = ids(b"abc?????")
    refined = Row(0, 0, text, 6, Choice(position=3, top=256, refine=True))
    found = Activations([refined, Row(1, 0, ids(b"beside"), 1)])
    for each in split_up(stack):
        found = each.step(found)
    context, total, work = text, np.zeros((6, 256), np.float32), Activations([Row(0, 0, text, 6)])
    for block in range(3):
        row = Row(0, 0, context, 6)
        work = stage(stack, range(block, block + 1)).step(
            Activations((row,), work.state, np.zeros_like(total))
        )
        total = total + work.readout_RV
        if block < 2:
            context = np.concatenate([text[:3], total.argmax(axis=1)[:-1]]).astype(np.uint16)
    expected = torch.log_softmax(torch.from_numpy(total) / 3, dim=-1)
    assert np.allclose(all_log_probs(found)[:6], expected, atol=1e-4)
    assert found.rows[0].ids.tolist() == context.tolist()
    assert found.rows[1].ids.tolist() == list(b"beside")


def test_readout_final_is_the_last_blocks_alone(stack: Stack):
    stages = [stage(stack, range(2), "final"), stage(stack, range(2, 3), "final")]
    between = stages[0].step(Activations(rows(b"abc")))
    assert not between.readout_RV.size and between.predictions is None
    last = stack.log_probs(torch.tensor([list(b"abc")]))[-1][0, -1]
    assert np.allclose(through(stages[1:], between)[0], last.numpy(), atol=1e-4)


def test_a_step_needs_its_context_in_the_cache(stack: Stack):
    stages = split_up(stack)
    through(stages, Activations(rows(b"abc", b"def")))
    stages[1].release(1)
    assert stages[1].requests == (0,)
    work = stages[0].step(Activations([Row(0, 3, ids(b"g"), 1), Row(1, 3, ids(b"g"), 1)]))
    with pytest.raises(MissingPrefixError) as missing:
        stages[1].step(work)
    assert missing.value.requests == (1,)
    assert stages[1].cached(0) == 3


def test_cache_bytes_are_whole_windows(stack: Stack):
    layers = sum(stack.config.depths) + sum(map(stack.config.tail_layers, range(3)))
    window = 3 * layers * stack.config.model.window * stack.config.model.width * 4
    full = stage(stack, range(3), limits=SlotLimits(cache_bytes=2 * window + 1))
    full.step(Activations(rows(b"a", b"b")))
    with pytest.raises(CacheFullError, match="all 2 slots"):
        full.step(Activations([Row(2, 0, ids(b"c"), 1)]))
    with pytest.raises(CacheFullError, match=f"{window} bytes"):
        stage(stack, range(3), limits=SlotLimits(cache_bytes=window - 1))


@pytest.mark.parametrize(
    "bad",
    [
        [],
        [Row(0, 0, ids(b"a"), 1), Row(0, 1, ids(b"b"), 1)],
        [Row(0, 0, ids(b""), 0)],
        [Row(0, 0, ids(b"ab"), 3)],
        [Row(0, 30, ids(b"abc"), 1)],
        [Row(0, -1, ids(b"abc"), 1)],
        [Row(0, 0, np.array([258], np.uint16), 1)],
    ],
)
def test_rows_that_make_no_sense_are_refused(stack: Stack, bad: list[Row]):
    first = stage(stack, range(1))
    with pytest.raises(ProtocolError):
        first.step(Activations(bad))
    assert first.requests == ()


def test_arrays_that_do_not_fit_their_rows_are_refused(stack: Stack):
    first, second = split_up(stack)
    work = first.step(Activations(rows(b"abc")))
    for state, read in ((work.state[:, 1:], work.readout_RV), (work.state, work.readout_RV[:0])):
        with pytest.raises(ProtocolError, match="have shape"):
            second.step(Activations(work.rows, state, read))


def test_a_stage_reads_the_files_of_its_own_blocks_alone(tmp_path: Path, config: Config):
    stack = awake_stack(of_kind(config, "denoise"))
    run = RunDir.create(tmp_path / "run", stack.config)
    for number in (1, 2):
        run.block(number).save(Snapshot(1, 1, None, weights_of(stack, number), {}, {}))
    loaded = StageCompute.load(BlockSource(run), range(1, 3), CPU)
    expected = through(split_up(stack), Activations(rows(b"abc")))
    work = stage(stack, range(1)).step(Activations(rows(b"abc")))
    assert np.allclose(through([loaded], work), expected, atol=1e-4)
    exported = RunDir.create(tmp_path / "exported", stack.config)
    exported.write_exported([weights_of(stack, number) for number in range(3)])
    first = StageCompute.load(BlockSource(exported), range(1), CPU)
    assert np.allclose(first.step(Activations(rows(b"abc"))).state, work.state, atol=1e-4)


def test_weights_in_8_bits_are_nearly_the_same_with_the_same_fingerprint(
    tmp_path: Path, stack: Stack
):
    run = RunDir.create(tmp_path / "run", stack.config)
    run.write_exported([weights_of(stack, number) for number in range(3)])
    sources = [BlockSource(run, held) for held in ("full", "int8")]
    full, int8 = (
        through([StageCompute.load(source, range(3), CPU)], Activations(rows(b"abcdef", read=6)))
        for source in sources
    )
    assert not np.array_equal(full, int8)
    assert (full - int8).std() < 0.05 * full.std()
    names = [[source.fingerprint(block) for block in range(3)] for source in sources]
    assert names[0] == names[1]
    assert len(set(names[0])) == 3


def weights_of(stack: Stack, number: int) -> dict[str, np.ndarray]:
    named = stack.blocks[number].named_parameters()
    return {name: parameter.detach().numpy() for name, parameter in named}


def test_single_bytes_are_not_padded_to_a_prompt():
    lengths = [1, 40, 1, 3, 30, 5, 1]
    shares = [
        RowSpan(
            Row(n, 0, np.zeros(length, np.uint16), 1),
            SlotOwner(6 - n, 0, 0.0),
        )
        for n, length in enumerate(lengths)
    ]
    groups = grouped_by_length(shares)
    assert [sorted(share.length for share in group) for group in groups] == [
        [1, 1, 1, 3],
        [5],
        [30, 40],
    ]
    assert [span.owner.slot for span in groups[0]] == [0, 3, 4, 6]
