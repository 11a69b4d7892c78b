"""Every message, taken apart: one example of each, and each value of it replaced by a wrong one."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from blocktrain.codec import CODECS
from blocktrain.protocol import check_messages as checks
from blocktrain.protocol import identity
from blocktrain.protocol import messages as m
from blocktrain.protocol import status_messages as status

HASH, OTHER_HASH = "ab" * 32, "cd" * 32
RUN, WORKER, LEASE = "run00001", "worker01", "lease001"

BLOB = m.Blob(name=HASH, size=9)
RECIPE = m.Recipe(size=9, chunks=(HASH, OTHER_HASH))
DESCRIPTION = m.RunDescription(
    run=RUN,
    protocol=1,
    config="[model]",
    corpus={"train": BLOB},
    corpus_digests={"train": "d"},
    whole_bytes=5,
)
LEASED = m.Lease(
    lease=LEASE, fence=1, block=0, base_version=2, base=BLOB, first_batch=64, steps=32,
    schedule_start=64, schedule_stride=2, seconds_left=9.5,
    predecessors=(m.Predecessor(block=0, version=1, weights=BLOB),),
)  # fmt: skip
COMMITMENT = m.Commitment(
    weights=(HASH, OTHER_HASH), moments=(OTHER_HASH, HASH), learned=HASH, residual=OTHER_HASH,
    predecessors=(3,),
)  # fmt: skip
STATE = checks.TrainingState(weights=BLOB, moments=BLOB)
TEXT = checks.LeasedText(
    first_batch=64, steps=32, schedule_start=64, schedule_stride=2,
    predecessors=LEASED.predecessors,
)  # fmt: skip
SCORE_CHECK = checks.ScoreCheck(current=BLOB, update=BLOB, base=BLOB, share=0.5, seed=7, windows=32)
REPLAY_CHECK = checks.ReplayCheck(
    first_step=8, steps=4, start=STATE, end=STATE, device="cpu",
    opening=checks.StartLink(base=BLOB, added=BLOB),
    closing=checks.EncodingLink(
        update=BLOB, start=BLOB, end=BLOB, residual=BLOB, learned=HASH, left_out=OTHER_HASH
    ),
)  # fmt: skip
CHECK = checks.Check(
    check="check001", block=0, version=3, text=TEXT, task=REPLAY_CHECK, seconds_left=60.0
)
LOSSES = checks.Losses(before=2.5, after=2.25, error=0.01)
SCORED = checks.ScoreResult(hidden=LOSSES, own=LOSSES)
REPLAYED = checks.ReplayResult(
    identical=False, cosine=0.5, distance=0.25, moments_distance=0.125, fault="f"
)
WAIT = m.Wait(seconds=1.5, reason="nothing to do")
CLAIM = m.UpdateClaim(
    run=RUN, worker=WORKER, lease=LEASE, fence=1, block=0, base_version=2, codec="none",
    recipe=RECIPE, loss=1.5, commitment=COMMITMENT,
)  # fmt: skip
MOVED = status.Moved(up=1, up_raw=2, down_whole=3, down_differences=4, down_raw=5)
DOWNLOADED = m.Downloaded(block=0, whole=1, differences=2, raw=3)
BLOCK = status.BlockStatus(
    index=0, version=2, weights=BLOB, ce=1.5, ce_note="n", bytes_trained=3, progress=0.5,
    replicas=1, participation=0.5, pending_updates=1, moved=MOVED,
)  # fmt: skip
TRUST = status.Trust(accepted=3, refused=1, replayed=2, suspicion=0.5, newcomer=True)
CHECKING = status.Checking(share=0.02, validators=1, waiting=2, note="n")
WORKING = status.WorkerStatus(
    worker=WORKER, name="n", role="train", device="cpu", block=0, state="training",
    bytes_trained=3, updates=1, seconds_since_seen=0.5, moved=MOVED, trust=TRUST,
)  # fmt: skip

EXAMPLES: list[m.Message] = [
    TRUST,
    CHECKING,
    m.Hello(run=RUN, protocols=(1,)),
    BLOB,
    RECIPE,
    m.BlobAnswer(recipe=RECIPE, urls={HASH: "https://store/chunk"}),
    m.Join(
        invite="s3cret", public_key="k3y", name="n", device="cpu", protocols=(1,), signature="s"
    ),
    DESCRIPTION,
    m.Joined(worker=WORKER, role="train", token="t", token_seconds=60, description=DESCRIPTION),
    m.TokenRequest(worker=WORKER, time=5, signature="sig"),
    m.Token(token="t", token_seconds=60),
    m.LeaseRequest(blocks=(0, 1), held_block=1, steps_per_second=2.5),
    LEASED.predecessors[0],
    LEASED,
    WAIT,
    m.Finished(),
    m.Reveal(lease=LEASE, files=(HASH,)),
    m.LeaseAnswer(answer=LEASED, reveal=m.Reveal(lease=LEASE, files=(HASH,))),
    m.LeaseReturn(fence=1, reason="stopped", downloads=()),
    m.LeaseProgress(fence=1, steps_done=3, loss=1.5),
    m.LeaseState(open=True, seconds_left=9.5, reason="r"),
    COMMITMENT,
    CLAIM,
    DOWNLOADED,
    m.UpdateOffer(claim=CLAIM, signature="sig", downloads=(DOWNLOADED,)),
    m.UploadState(missing=(HASH,), urls={HASH: "https://store/chunk"}),
    m.Receipt(state="merged", reason="r", weight=0.5),
    m.RevealOffer(recipes=(RECIPE,)),
    checks.CheckRequest(blocks=(0, 1), held_block=1),
    TEXT,
    SCORE_CHECK,
    STATE,
    REPLAY_CHECK.opening,
    REPLAY_CHECK.closing,
    REPLAY_CHECK,
    CHECK,
    checks.CheckAnswer(answer=CHECK),
    LOSSES,
    SCORED,
    REPLAYED,
    checks.Unable(reason="r"),
    checks.CheckResult(result=SCORED, seconds=1.5, device="cpu", downloads=(DOWNLOADED,)),
    status.Score(block=0, versions=(1, 2), split="valid", windows="windows1", ce=1.5, downloads=()),
    m.Differences(differences=(BLOB,)),
    MOVED,
    BLOCK,
    WORKING,
    status.Status(
        run=RUN, state="running", ce=1.5, ce_note="n", codec="int8", blocks=(BLOCK,),
        workers=(WORKING,), seconds=0.5, checking=CHECKING,
    ),
    status.Event(number=1, time=0.5, kind="merged", worker=WORKER, block=0, detail="d"),
    m.Refusal(error="gone", reason="r"),
    m.Addresses(addresses=("https://host:1",)),
]  # fmt: skip
each_message = pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)

# Texts of any length: only the coordinator writes them, or the store that signs an address.
UNBOUNDED = {"config", "token", "urls", "corpus_digests"}
PROTOCOL_DOCUMENT = pathlib.Path(__file__).parents[3] / "docs" / "PROTOCOL.md"

Path = tuple[str | int, ...]


def places(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value inside a JSON value, with the way to it."""
    yield path, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places(inner, (*path, index))


def replaced(value: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def refuses(message: m.Message, path: Path, new: Any) -> bool:
    changed = replaced(message.model_dump(mode="json"), path, new)
    try:
        type(message).model_validate_json(json.dumps(changed))
    except ValidationError:
        return True
    return False


def test_there_is_an_example_of_every_message():
    assert {type(example) for example in EXAMPLES} == {
        message
        for message in m.Message.__subclasses__()
        if message.__module__ in {m.__name__, checks.__name__, status.__name__}
    }


@each_message
def test_every_message_and_field_is_documented(message: m.Message):
    text = PROTOCOL_DOCUMENT.read_text(encoding="utf-8")
    assert f"`{type(message).__name__}`" in text
    if not isinstance(message, status.BlockStatus | status.WorkerStatus):  # for people to look at
        for attribute, field in type(message).model_fields.items():
            name = field.serialization_alias or attribute
            assert f"`{name}`" in text or f'"{name}"' in text, name


@each_message
def test_a_message_comes_back_from_json_as_it_was(message: m.Message):
    assert type(message).model_validate_json(message.model_dump_json()) == message


@each_message
def test_unknown_fields_are_refused_at_every_depth(message: m.Message):
    for path, value in places(message.model_dump(mode="json")):
        if isinstance(value, dict):
            assert refuses(message, path, {**value, "surprise": 1}), path


@each_message
def test_missing_fields_are_refused_unless_they_have_a_default(message: m.Message):
    fields = message.model_dump(mode="json")
    for name, field in type(message).model_fields.items():
        without = {key: value for key, value in fields.items() if key != name}
        if field.is_required():
            assert refuses(message, (), without), name
        else:
            type(message).model_validate_json(json.dumps(without))


@each_message
def test_wrong_types_are_refused_and_nothing_is_converted(message: m.Message):
    for path, value in places(message.model_dump(mode="json")):
        for wrong in wrong_types(value):
            assert refuses(message, path, wrong), (path, wrong)


def wrong_types(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [1, "true", {}]
    if isinstance(value, int):
        return [str(value), value + 0.5, True, [value]]
    if isinstance(value, float):
        return [str(value), True, [value]]
    if isinstance(value, str):
        return [7, False, [value], {}]
    if isinstance(value, list):
        return ["text", 7, {"0": value}]
    return ["text", 7, [value]]


@each_message
def test_numbers_that_are_not_finite_are_refused(message: m.Message):
    for path, value in places(message.model_dump(mode="json")):
        if isinstance(value, float):
            for wrong in (float("nan"), float("inf"), float("-inf")):
                assert refuses(message, path, wrong), (path, wrong)


@each_message
def test_texts_that_are_too_long_are_refused(message: m.Message):
    for path, value in places(message.model_dump(mode="json")):
        free = isinstance(message, m.Refusal) or not UNBOUNDED.isdisjoint(path)
        if isinstance(value, str) and not (free and path[-1] != "error"):
            assert refuses(message, path, value[0] * 1000), path


@each_message
def test_a_message_cannot_be_changed(message: m.Message):
    for name in type(message).model_fields:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(message, name, getattr(message, name))


JOIN = m.Join(
    invite="s3cret", public_key="k3y", name="n", device="cpu", protocols=(1,), signature="s"
)
SCORE = status.Score(block=0, versions=(1,), split="valid", windows="windows1", ce=1.5)


@pytest.mark.parametrize(
    ("message", "path", "wrong"),
    [
        (BLOB, ("name",), HASH.upper()),
        (BLOB, ("name",), HASH + "\n"),
        (BLOB, ("name",), HASH[:-1]),
        (BLOB, ("size",), -1),
        (BLOB, ("size",), 2**53 + 1),
        (LEASED, ("fence",), 0),
        (LEASED, ("steps",), 0),
        (LEASED, ("block",), 4096),
        (LEASED, ("lease",), "../../etc"),
        (LEASED, ("kind",), "wait"),
        (CLAIM, ("codec",), "zip"),
        (CLAIM, ("run",), "run 0001"),
        (WORKING, ("name",), ""),
        (WORKING, ("name",), "two\nlines"),
        (WORKING, ("name",), "\x9b2J"),
        (JOIN, ("name",), "evil\u202egpj.exe"),
        (JOIN, ("device",), "\u2066cpu"),
        (SCORE, ("ce",), -5.0),
        (SCORE, ("ce",), 1e300),
        (SCORE, ("versions",), [2**53 + 1]),
        (WORKING, ("state",), "asleep"),
        (WORKING, ("role",), "operator"),
    ],
)
def test_values_outside_their_range_are_refused(message: m.Message, path: Path, wrong: Any):
    assert refuses(message, path, wrong)


def test_a_commitment_names_both_halves_of_each_state():
    assert refuses(COMMITMENT, ("weights",), [HASH] * 3)


def test_what_nobody_asks_for_is_left_out():
    """The first release refuses fields that it does not know."""
    claim, answer = CLAIM.model_copy(update={"commitment": None}), m.LeaseAnswer(answer=WAIT)
    for message, name in ((claim, "commitment"), (answer, "reveal")):
        assert name not in message.model_dump_json()


def test_a_check_is_read_by_its_method():
    for task in (SCORE_CHECK, REPLAY_CHECK):
        text = CHECK.model_copy(update={"task": task}).model_dump_json()
        assert type(checks.Check.model_validate_json(text).task) is type(task)
    for result in (SCORED, REPLAYED, checks.Unable(reason="r")):
        text = checks.CheckResult(result=result, seconds=1.0, device="cpu").model_dump_json()
        assert type(checks.CheckResult.model_validate_json(text).result) is type(result)


def test_an_answer_is_read_by_its_kind():
    for answer in (LEASED, WAIT, m.Finished()):
        text = m.LeaseAnswer(answer=answer).model_dump_json()
        assert type(m.LeaseAnswer.model_validate_json(text).answer) is type(answer)
    assert refuses(m.LeaseAnswer(answer=WAIT), ("answer", "kind"), "rest")


hashes = st.binary(min_size=32, max_size=32).map(bytes.hex)
identifiers = st.binary(min_size=4, max_size=32).map(bytes.hex)
base64s = st.binary(min_size=1, max_size=96).map(identity.base64url_encode)
names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=80)
reasons = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=500)
counts = st.integers(0, 2**53)
positives = st.integers(1, 2**53)
indices = st.integers(0, 4095)
floats = st.floats(allow_nan=False, allow_infinity=False)
recipes = st.builds(m.Recipe, size=counts, chunks=st.lists(hashes, max_size=4).map(tuple))
blobs = st.builds(m.Blob, name=hashes, size=counts)
claims = st.builds(
    m.UpdateClaim, run=identifiers, worker=identifiers, lease=identifiers, fence=positives,
    block=indices, base_version=counts, codec=st.sampled_from(CODECS), recipe=recipes,
    loss=st.none() | floats,
)  # fmt: skip
leases = st.builds(
    m.Lease, kind=st.just("lease"), lease=identifiers, fence=positives, block=indices,
    base_version=counts, base=blobs, first_batch=counts, steps=positives, schedule_start=counts,
    schedule_stride=positives, seconds_left=floats,
    predecessors=st.lists(
        st.builds(m.Predecessor, block=indices, version=counts, weights=blobs), max_size=3
    ).map(tuple),
)  # fmt: skip
drawn_messages = st.one_of(
    st.builds(
        m.Join, invite=base64s, signature=base64s, public_key=base64s, name=names, device=names,
        protocols=st.lists(st.integers(), max_size=16).map(tuple),
    ),
    st.builds(m.LeaseAnswer, answer=leases),
    st.builds(m.UpdateOffer, claim=claims, signature=base64s),
    st.builds(
        m.UploadState, missing=st.lists(hashes, max_size=3).map(tuple),
        urls=st.none() | st.dictionaries(hashes, st.text(max_size=40), max_size=2),
    ),
    st.builds(m.Receipt, reason=reasons, weight=floats),
    st.builds(
        status.Event, number=positives, time=floats, worker=st.none() | identifiers,
        block=st.none() | indices, detail=reasons,
    ),
)  # fmt: skip


@given(message=drawn_messages)
@settings(deadline=None, max_examples=100)
def test_any_message_survives_json(message: m.Message):
    assert type(message).model_validate_json(message.model_dump_json()) == message
