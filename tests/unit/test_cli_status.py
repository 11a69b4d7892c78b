"""What `blocktrain status` shows, in terminals of several sizes."""

import pytest
from rich.console import Console

from blocktrain.cli.status_command import _render
from blocktrain.protocol.messages import Blob, BlockStatus, Moved, Status, WorkerStatus

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


def shown(status: Status, width: int, rows: int | None = None) -> list[str]:
    console = Console(width=width, height=rows or 25, color_system=None)
    with console.capture() as captured:
        console.print(_render(status, console, rows))
    return captured.get().splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_a_workers_id_and_state_are_never_cut(width: int):
    text = "\n".join(shown(status(), width))
    for worker in status().workers:
        assert worker.worker in text
        assert f" {worker.state} " in text


def test_at_eighty_columns_only_the_device_is_missing():
    text = "\n".join(shown(status(), 80))
    assert "device" not in text
    for words in ("[b]machi", "12345", "123 MB", "2 h ago"):
        assert words in text
    assert "RTX 4090" in "\n".join(shown(status(), 160))


@pytest.mark.parametrize(("blocks", "workers"), [(4, 3), (4, 50), (64, 50), (1, 0)])
def test_a_screen_holds_whole_tables_or_says_how_much_more_there_is(blocks: int, workers: int):
    lines = shown(status(blocks, workers), 80, rows=23)
    assert len(lines) <= 23
    assert lines[-1].startswith("└") or "more" in lines[-1]
    if workers == 50 and blocks == 4:
        named = "\n".join(lines)
        assert "training" in named and "away" not in named  # who is there comes first
        assert "and 43 more" in named


def test_a_run_that_is_over_took_its_time():
    assert "running for 0:00:33" in shown(status(), 80)[0]
    assert "finished after 0:00:33" in shown(status(state="finished"), 80)[0]


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
    assert cells == ["block 0", "1.0 MB", "3.0 MB", "2.0 MB", "2.5"]


def test_nothing_that_a_coordinator_says_commands_the_terminal():
    now = status(ce_note="[b]\x1b[2J\x9b31m")
    turning = [worker.model_copy(update={"name": "x\u202ey"}) for worker in now.workers]
    text = "".join(shown(now.model_copy(update={"workers": turning}), 160))
    assert text.isprintable()
    assert "CE: [b] [2J 31m" in text
