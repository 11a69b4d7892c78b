"""What `blocktrain status` shows, in terminals of several sizes."""

import pytest
from rich.console import Console

from blocktrain.cli.status_tables import Screen, render
from blocktrain.config import Config
from blocktrain.protocol.messages import Blob
from blocktrain.protocol.page_messages import BlockOverview, Measure, Overview, Trend
from blocktrain.protocol.status_messages import (
    BlockStatus,
    Checking,
    Moved,
    Status,
    Trust,
    WorkerStatus,
)

STATES = ["away", "training", "waiting"]


def status(blocks: int = 4, workers: int = 3, **changes: object) -> Status:
    weights = Blob(name="0" * 64, size=1)
    return Status(
        run="zatvonzfqsshmi57", state="running", ce=None, ce_note="not scored yet", seconds=33.0,
        codec="int8",
        blocks=tuple(
            BlockStatus(index=index, version=12, weights=weights, ce=2.5, bytes_trained=10**9,
                        progress=0.5, replicas=1, participation=1.0, pending_updates=0,
                        moved=Moved())
            for index in range(blocks)
        ),
        workers=tuple(
            WorkerStatus(worker=f"worker{number:010d}", name=f"[b]machine {number} of somebody",
                         role="train", device="NVIDIA GeForce RTX 4090, bf16", block=None,
                         state=STATES[number % 3], bytes_trained=123 * 10**6, updates=12345,
                         seconds_since_seen=7200.0, moved=Moved())
            for number in range(workers)
        ),
    ).model_copy(update=changes)  # fmt: skip


def overview(status: Status, **changes: object) -> Overview:
    trend = Trend(change=-0.0312, seconds=720.0)
    loss = Measure(value=2.5, source="workers", time=0.0, trend=trend)
    return Overview(
        run=status.run, title=None, public=True, kind="denoise", codec=status.codec, parameters=1,
        state="running", time=33.0, started=0.0, finished=None, progress=0.5, seconds_left=7200.0,
        tokens_trained=1, tokens_total=2, tokens_per_second=3450.0, bytes_per_token=1.0,
        wanted_lead=0.0, score=None, score_note="not scored yet", reference=None,
        workers={"training": 1, "waiting": 1}, present=2, waiting=1,
        blocks=tuple(
            BlockOverview(index=block.index, version=block.version, progress=block.progress,
                          loss=loss, tokens_per_second=1725.0, replicas=1, pending_updates=0,
                          staleness=0.25, lead=None, participation=1.0, moved=Moved())
            for block in status.blocks
        ),
        moved=Moved(), checking=None, last_event=0,
    ).model_copy(update=changes)  # fmt: skip


def shown(
    status: Status,
    width: int,
    rows: int | None = None,
    overview: Overview | None = None,
    *,
    shows_all: bool = True,
) -> list[str]:
    console = Console(width=width, height=rows or 25, color_system=None)
    count = len(status.blocks)
    config = Config().with_settings(model__blocks=count, model__layers=3 * count)
    with console.capture() as captured:
        console.print(render(status, overview, config, Screen(console, rows, shows_all)))
    return captured.get().splitlines()


def test_a_run_shows_how_far_it_is_how_fast_and_whether_it_learns():
    now = status()
    score = Measure(
        value=2.9488, source="scores", time=0.0, trend=Trend(change=-0.1, seconds=120.0)
    )
    text = "\n".join(shown(now, 160, overview=overview(now, score=score, reference=2.1)))
    for words in (
        "50.0% done", "about 2 h left", "3.45 k tokens/s", "score 2.9488 nats/byte",
        "-0.1000 in 2 min, reference 2.1000", "workers here: 2, of which 1 train, 1 wait (50%)",
        "-0.0312 in 12 min", "as workers report it, not verified",
    ):  # fmt: skip
        assert words in text, words
    paused = overview(now, state="paused", seconds_left=None)
    assert "run zatvonzfqsshmi57: paused for 0:00:33" in "\n".join(shown(now, 160, None, paused))


def test_workers_that_left_are_counted_and_those_that_failed_are_named():
    now = status(workers=6)
    states = ("training", "away", "away", "lost", "banned", "waiting")
    workers = tuple(
        each.model_copy(update={"state": state, "name": f"name {number}"})
        for number, (each, state) in enumerate(zip(now.workers, states, strict=True))
    )
    now = now.model_copy(update={"workers": workers})
    text = " ".join(shown(now, 160, shows_all=False))
    assert "name 0" in text and "name 5" in text and "name 1" not in text
    assert "1 vanished while they trained (name 3), 2 left, 1 were banned (name 4)" in text
    assert "name 1" in " ".join(shown(now, 160))


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_a_workers_id_and_state_are_never_cut(width: int):
    text = "\n".join(shown(status(), width))
    for worker in status().workers:
        assert worker.worker in text
        assert f" {worker.state} " in text


def test_at_eighty_columns_only_the_device_is_missing():
    text = "\n".join(shown(status(), 80))
    assert "device" not in text
    for words in ("[b]mach", "12345", "123 MB", "2 h ago"):
        assert words in text
    assert "RTX 4090" in "\n".join(shown(status(), 160))


@pytest.mark.parametrize(("blocks", "workers"), [(4, 3), (4, 50), (64, 50), (1, 0)])
def test_a_screen_holds_whole_tables_or_says_how_much_more_there_is(blocks: int, workers: int):
    lines = shown(status(blocks, workers), 80, rows=23)
    assert len(lines) <= 23
    end = lines[-1] + lines[-2]
    assert lines[-1].startswith("└") or "more" in end or "no update" in end
    if workers == 50 and blocks == 4:
        named = "\n".join(lines)
        assert "training" in named and "away" not in named  # who is there comes first
        assert "and 48 more" in named


def test_a_run_that_is_over_took_its_time():
    assert "running for 0:00:33" in shown(status(), 80)[1]
    assert "finished after 0:00:33" in shown(status(state="finished"), 80)[1]


@pytest.mark.parametrize("seconds", [-5.0, 1e300])
def test_a_clock_that_jumps_shows_no_impossible_time(seconds: float):
    told = status(seconds=seconds)
    worker = told.workers[0].model_copy(update={"seconds_since_seen": seconds})
    lines = shown(told.model_copy(update={"workers": (worker,)}), 120)
    assert lines[1].startswith("run") and not any("-" + "5" in line for line in lines)


def test_what_was_moved_stands_beside_how_many_times_as_much_it_would_have_been_in_fp32():
    moved = Moved(
        up=10**6, up_raw=4 * 10**6, down_whole=3 * 10**6, down_differences=2 * 10**6,
        down_raw=11 * 10**6,
    )  # fmt: skip
    now = status(1, workers=0)
    blocks = tuple(block.model_copy(update={"moved": moved}) for block in now.blocks)
    lines = shown(now.model_copy(update={"blocks": blocks}), 80)
    assert any("codec int8" in line for line in lines)
    (row,) = [line for line in lines if "block 0" in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["block 0", "1.0 MB", "3.0 MB", "2.0 MB", "2.5x"]


def test_nothing_that_a_coordinator_says_commands_the_terminal():
    now = status(ce_note="[b]\x1b[2J\x9b31m")
    turning = [worker.model_copy(update={"name": "x\u202ey"}) for worker in now.workers]
    text = "".join(shown(now.model_copy(update={"workers": turning}), 160))
    assert text.isprintable()
    assert "CE: [b] [2J 31m" in text


def test_the_checks_of_a_run_are_shown_with_their_cost_and_what_they_refused():
    assert "updates are not checked" in shown(status(), 80)[3]
    now = status(1, workers=1)
    trust = Trust(accepted=40, refused=17, replayed=3, suspicion=1.5, newcomer=False)
    checked = now.model_copy(
        update={
            "checking": Checking(share=0.0213, validators=2, waiting=3, note="nobody answers"),
            "workers": (now.workers[0].model_copy(update={"trust": trust}),),
        }
    )
    lines = shown(checked, 160)
    said = "checks: 2.1% of the training time, 2 validators, 3 updates wait; nobody answers"
    assert lines[3].strip() == said
    assert any("refused" in line for line in lines) and any(" 17 " in line for line in lines)
    assert not any("refused" in line for line in shown(now, 160))
