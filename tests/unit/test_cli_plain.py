"""What a coordinator says is shown by whoever joined it, and commands nothing."""

import sys
import time

import pytest

from blocktrain.cli import main
from blocktrain.cli import options as calling
from blocktrain.cli.display import plain
from blocktrain.cli.worker_command import _shown
from blocktrain.errors import RefusedError
from blocktrain.worker.events import WorkerEvent

SAID = "no\x1b]0;mine\x07 \x9b2J\r\n[/b] :bomb: \u202ereason"
SHOWN = "no ]0;mine   2J  [/b] :bomb:  reason"


def test_a_line_is_left_as_it_is_but_for_what_commands():
    assert plain(SAID) == SHOWN
    assert plain("größe 3 µs → 5") == "größe 3 µs → 5"


def test_lines_of_a_worker(capsys: pytest.CaptureFixture[str]):
    with _shown(as_json=False) as show:
        show(WorkerEvent("waiting", SAID))
        show(WorkerEvent("refused", SAID))
        show(WorkerEvent("finished", SAID, contribution=1))
    lines = capsys.readouterr().out.split("\n")
    assert lines[:2] == [SHOWN, SHOWN]
    assert lines[2].startswith(f"{SHOWN}; 1 ")
    assert all(line.isprintable() for line in lines)


def test_the_living_line_of_a_worker(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with _shown(as_json=False) as show:
        show(WorkerEvent("refused", SAID))
        show(WorkerEvent("waiting", SAID))
        time.sleep(0.2)  # until it is drawn
    written = capsys.readouterr().out
    assert written.count(SHOWN) >= 2
    assert not any(command in written for command in ("\x1b]0;", "\x07", "\x9b", "\u202e"))


def test_the_error_that_ends_a_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def refused(**options: object) -> None:
        raise RefusedError("forbidden", SAID)

    monkeypatch.setattr(main, "cli", refused)
    with pytest.raises(SystemExit):
        main.main()
    assert capsys.readouterr().err == f"error: {SHOWN}\n"


def test_why_a_command_still_waits(capsys: pytest.CaptureFixture[str]):
    calling._tell(SAID, 60.0)
    assert capsys.readouterr().err == f"{SHOWN}; trying again for 60 s\n"
