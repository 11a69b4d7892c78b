"""Log lines as text and as JSON, and next to a bar of rich."""

import io
import json
import logging
import sys

import pytest
from rich.console import Console

from blocktrain.cli.terminal import LOG_LEVELS, configure_logging

log = logging.getLogger("blocktrain.test")


def lines(captured: pytest.CaptureFixture[str]) -> list[str]:
    return captured.readouterr().err.splitlines()


def test_a_line_has_time_level_logger_message_and_fields(capsys: pytest.CaptureFixture[str]):
    configure_logging("info", "text")
    log.info("merged block %d", 3, extra={"lease": "l-1", "block": 3})
    (line,) = lines(capsys)
    time, rest = line.split(" ", 1)
    assert len(time) == len("2026-01-31T12:00:00.000Z") and time[10] == "T" and time[-1] == "Z"
    assert rest == "INFO blocktrain.test: merged block 3 lease=l-1 block=3"


def test_a_line_on_a_terminal_is_short(monkeypatch: pytest.MonkeyPatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    configure_logging("info", "text")
    log.info("worker ann joined", extra={"event": "joined"})
    log.warning("merge failed: %s", "\x1b[2J", extra={"block": 3})
    first, second = terminal.getvalue().splitlines()
    time, message = first.split(" ", 1)
    assert len(time) == len("12:00:00") and message == "worker ann joined"
    assert second.split(" ", 1)[1].startswith("warning: merge failed: ")
    assert second.endswith(" block=3") and second.isprintable()


def test_json_lines_have_the_same_and_tracebacks(capsys: pytest.CaptureFixture[str]):
    configure_logging("info", "json")
    log.info("merged block %d", 3, extra={"lease": "l-1"})
    try:
        raise ValueError("odd\nvalue")
    except ValueError:
        log.exception("it failed")
    first, second = map(json.loads, lines(capsys))
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "info", "logger": "blocktrain.test", "message": "merged block 3", "lease": "l-1",
    }  # fmt: skip
    assert second["level"] == "error"
    assert second["traceback"].startswith("Traceback") and "ValueError: odd" in second["traceback"]


def test_text_from_other_machines_controls_no_terminal(capsys: pytest.CaptureFixture[str]):
    configure_logging("info", "text")
    log.warning("refused: %s", "\x1b[2J\x9b31m\r\nINFO a line of its own", extra={"name_": "\x07"})
    (line,) = lines(capsys)
    assert line.isprintable()


@pytest.mark.parametrize(
    ("level", "ours", "theirs"),
    [("debug", "debug", "info"), ("info", "info", "warning"), ("error", "error", "warning")],
)
def test_libraries_log_their_routine_at_debug_alone(level: str, ours: str, theirs: str):
    configure_logging(level, "text")
    for name, lowest in (("blocktrain.test", ours), ("uvicorn.access", theirs)):
        logger = logging.getLogger(name)
        enabled = [
            each for each in LOG_LEVELS if logger.isEnabledFor(getattr(logging, each.upper()))
        ]
        assert enabled[0] == lowest


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_on_the_terminal_is_not_garbled(monkeypatch: pytest.MonkeyPatch, is_terminal: bool):
    """Standard error on the same terminal: above the bar; into a file: not to the terminal."""
    configure_logging("warning", "text")
    terminal, file = io.StringIO(), io.StringIO()
    monkeypatch.setattr(file, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", file)
    with Console(file=terminal, force_terminal=True, width=200).status("training"):
        log.warning("slow")
    assert ("WARNING blocktrain.test: slow" in terminal.getvalue()) is is_terminal
    assert ("WARNING blocktrain.test: slow" in file.getvalue()) is not is_terminal
