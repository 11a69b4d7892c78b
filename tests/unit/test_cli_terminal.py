"""Sizes, durations, and text from other machines, which must not control the terminal."""

import math
import sys
import time

import pytest

from blocktrain.cli import main
from blocktrain.cli.terminal import (
    duration,
    echo_words,
    plain,
    score,
    show_retry,
    size,
    training_progress,
)
from blocktrain.cli.worker_command import _event_display, _progress
from blocktrain.errors import RefusedError
from blocktrain.training.checkpoints import Progress
from blocktrain.worker.machine import WorkerEvent

SAID = "no\x1b]0;mine\x07 \x9b2J\r\n[/b] :bomb: \u202ereason"
SHOWN = "no ]0;mine   2J  [/b] :bomb:  reason"


def test_plain_replaces_control_characters_alone():
    assert plain(SAID) == SHOWN
    assert plain("größe 3 µs → 5") == "größe 3 µs → 5"


def test_lines_of_a_worker(capsys: pytest.CaptureFixture[str]):
    with _event_display(as_json=False) as show:
        show(WorkerEvent("waiting", SAID))
        show(WorkerEvent("refused", SAID))
        show(WorkerEvent("finished", SAID, contribution=1))
    lines = capsys.readouterr().out.split("\n")
    assert lines[:2] == [SHOWN, SHOWN]
    assert lines[2].startswith(f"{SHOWN}; accepted from this worker: updates for 1 ")
    assert all(line.isprintable() for line in lines)


def test_the_living_line_of_a_worker(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with _event_display(as_json=False) as show:
        show(WorkerEvent("refused", SAID))
        show(WorkerEvent("waiting", SAID))
        time.sleep(0.2)  # until it is drawn
    written = capsys.readouterr().out
    assert written.count(SHOWN) >= 2
    assert not any(command in written for command in ("\x1b]0;", "\x07", "\x9b", "\u202e"))


def test_what_a_worker_does_fits_into_80_columns():
    now = WorkerEvent(
        "training", "", block=12, step=199, steps=200, loss=10.25, bytes_per_s=1.2e6,
        bytes_down=123_400_000, bytes_up=123_400_000, contribution=12_300_000, seconds_left=119.0,
    )  # fmt: skip
    lines = _progress(now)
    assert lines[0] == "block 12  199/200  due in 119 s  loss 10.2500  1.2 MB/s"
    assert lines[1] == "down 123 MB  up 123 MB  trained 12.3 MB"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_lines_on_a_terminal_are_broken_between_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_terminal: bool
):
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    echo_words("ok  memory: 12.3 GB free in this machine", indent=4)
    broken = "ok  memory: 12.3 GB\n    free in this\n    machine\n"
    whole = "ok  memory: 12.3 GB free in this machine\n"
    assert capsys.readouterr().out == (broken if is_terminal else whole)


def test_the_error_that_ends_a_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def refused(**options: object) -> None:
        raise RefusedError("forbidden", SAID)

    monkeypatch.setattr(main, "cli", refused)
    with pytest.raises(SystemExit):
        main.main()
    assert capsys.readouterr().err == f"error: {SHOWN}\n"


def test_a_retry_says_why_and_for_how_long(capsys: pytest.CaptureFixture[str]):
    show_retry(SAID, 60.0)
    assert capsys.readouterr().err == f"{SHOWN}; retrying for 60 s\n"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (99_949, "99.9 kB"),
        (99_950, "100 kB"),
        (123e6, "123 MB"),
        (5e13, "50.0 TB"),
    ],
)
def test_sizes_have_a_unit(count: float, text: str):
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0123, "12.3 ms"), (1.0, "1.0 s"), (119.0, "119.0 s"), (150.0, "2.5 min"),
        (7200.0, "2.0 h"), (math.inf, "never"),
    ],
)  # fmt: skip
def test_durations_have_a_unit_that_fits(seconds: float, text: str):
    assert duration(seconds) == text


def test_a_score_is_shown_in_every_unit(capsys: pytest.CaptureFixture[str]):
    assert score(math.log(2), 1.0) == "0.6931 nats/byte (1.0000 bits/byte)"
    assert score(1.0, 3.5) == "1.0000 nats/byte (1.4427 bits/byte, about 3.500 nats/token)"
    done = Progress(0, 9, 9, 3.5, 1.0, 0.1, 2e3, 0.0, 0, valid_ce=2.0, bytes_per_token=3.5)
    with training_progress("block") as show:
        show(done)
    (line,) = capsys.readouterr().out.splitlines()
    assert f"ce {score(1.0, 3.5)}  2 kB/s  done  valid {score(2.0, 3.5)}" in line
