"""Records a run of two workers: terminals as an animated SVG, and the run page as a picture.

    PYTHONPATH=src:. python scripts/record.py [--out docs] [--steps 60]

Starts a coordinator, two workers and `status --watch`, each in a terminal of its own (tmux), looks
at them every few seconds until the run is finished and scored, and takes a picture of the run page
with Chromium. Writes recording.svg and run-page.png. Takes a few minutes; needs tmux, chromium and
the `dev` extra.
"""

import argparse
import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import click
from playwright.sync_api import expect
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.terminal_theme import MONOKAI
from rich.text import Text
from tests.support.browser import chromium

from blocktrain.cli.options import client_of
from blocktrain.protocol.status_messages import Status

COLUMNS = 100
LOOK_SECONDS, LAST_LOOKS_SECONDS = 1.0, 5.0
MOST_FRAMES = 14
FRAME_SECONDS, LAST_SECONDS = 1.5, 6.0  # how long the SVG shows a frame, and the last one
MOST_SECONDS = 900.0
CELL_WIDTH, CELL_HEIGHT, MARGIN = 7.7, 16, 14
FOREGROUND, BACKGROUND, FRAME = "#d9d9d9", "#1b1f24", "#3a424d"
LONG_SECRET = re.compile(r"(bt1_[\w-]{8})[\w-]+|(#operator=[\w-]{4})[\w-]+")
PAGE_SIZE = {"width": 1180, "height": 900}
Lines = list[list[Segment]]


class Terminal:
    """A shell in a terminal, which is typed into and looked at."""

    def __init__(self, socket: Path, title: str, rows: int, folder: Path) -> None:
        self.title, self.rows, self._tmux = title, rows, ["tmux", "-S", str(socket)]
        self._name = title.replace(" ", "-")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        modules = os.environ.get("PYTHONPATH", "")
        self._run(
            "-f", "/dev/null", "new-session", "-d", "-s", self._name, "-x", str(COLUMNS),
            "-y", str(rows), "-c", str(folder), "env", "-u", "TMUX", f"PATH={path}", "PS1=$ ",
            f"PYTHONPATH={modules}", f"HOME={folder}", "COLORTERM=truecolor", "sh",
        )  # fmt: skip

    def type(self, line: str) -> None:
        self._run("send-keys", "-t", self._name, "-l", line)
        self._run("send-keys", "-t", self._name, "Enter")

    def interrupt(self) -> None:
        self._run("send-keys", "-t", self._name, "C-c")

    def text(self) -> str:
        """What is on the screen; lines that the terminal has wrapped are one line."""
        return self._run("capture-pane", "-p", "-J", "-t", self._name)

    def lines(self, console: Console) -> Lines:
        shown = self._run("capture-pane", "-p", "-e", "-J", "-t", self._name).split("\n")
        while shown and not shown[-1].strip():
            shown.pop()
        lines = []
        for line in shown[-self.rows :]:
            text = Text.from_ansi(line)
            while match := LONG_SECRET.search(text.plain):  # secrets of a run that is over
                start = match.end(match.lastindex or 0)
                text = text[:start] + Text("...") + text[match.end() :]
            text.rstrip()
            text.truncate(COLUMNS)
            lines.append([each for each in text.render(console) if each.text])
        return lines

    def _run(self, *words: str) -> str:
        done = subprocess.run([*self._tmux, *words], capture_output=True, text=True, check=True)
        return done.stdout


@dataclass(frozen=True)
class Terminals:
    coordinator: Terminal
    workers: tuple[Terminal, ...]
    status: Terminal

    def all(self) -> tuple[Terminal, ...]:
        return (self.coordinator, *self.workers, self.status)

    def lines(self) -> list[Lines]:
        console = Console(color_system="truecolor")
        return [terminal.lines(console) for terminal in self.all()]


@contextmanager
def terminals(folder: Path) -> Iterator[Terminals]:
    socket = folder / "tmux"

    def new(title: str, rows: int) -> Terminal:
        return Terminal(socket, title, rows, folder)

    try:
        workers = new("ann's machine", 5), new("bob's machine", 5)
        yield Terminals(new("the coordinator's machine", 11), workers, new("watching", 29))
    finally:
        subprocess.run(["tmux", "-S", str(socket), "kill-server"], capture_output=True, check=False)


def record(folder: Path, steps: int, picture: Path) -> list[list[Lines]]:
    """Frames of all terminals, from the start of a run to its end."""
    frames: list[list[Lines]] = []
    with ExitStack() as stack:
        shown = stack.enter_context(terminals(folder))
        begin = f"blocktrain coordinator --config demo --set train.steps={steps}"
        shown.coordinator.type(f"{begin} --listen 127.0.0.1:7070 --title 'Our first model'")
        invite = wait_for(shown.coordinator, r"worker (bt1_\S+)")
        address = wait_for(shown.coordinator, r"page\s+(https://\S+)")
        frames.append(shown.lines())
        for terminal, name in zip(shown.workers, ("ann", "bob"), strict=True):
            terminal.type(f"blocktrain worker {invite} --name {name} --threads 1")
        wait_for(shown.workers[0], "text: ")
        frames.append(shown.lines())
        shown.status.type(f"blocktrain status {invite} --watch")
        client = stack.enter_context(closing(client_of(invite)))
        last, ends = time.monotonic() + MOST_SECONDS, None
        while ends is None or time.monotonic() < ends:
            time.sleep(LOOK_SECONDS)
            frames.append(shown.lines())
            if ends is None and is_scored(client.status()):
                ends = time.monotonic() + LAST_LOOKS_SECONDS
            if time.monotonic() > last:
                raise SystemExit(f"the run did not finish:\n{shown.status.text()}")
        photograph(address, picture)
    return frames


def is_scored(status: Status) -> bool:
    """Whether the run is finished and its final versions are scored."""
    versions = tuple(block.version for block in status.blocks)
    scored = status.checking.scored if status.checking else ()
    return status.state == "finished" and scored == versions


def wait_for(terminal: Terminal, pattern: str, seconds: float = 120.0) -> str:
    ends = time.monotonic() + seconds
    while not (match := re.search(pattern, terminal.text())):
        if time.monotonic() > ends:
            raise SystemExit(f"not seen: {pattern}\n{terminal.text()}")
        time.sleep(0.2)
    return match[match.lastindex or 0]


def photograph(address: str, picture: Path) -> None:
    with chromium() as browser:
        context = browser.new_context(viewport=PAGE_SIZE, ignore_https_errors=True)
        page = context.new_page()
        page.goto(f"https://{urlsplit(address).netloc}/")
        expect(page.locator("#connection")).to_have_text("live", timeout=20_000)
        time.sleep(2.0)
        page.screenshot(path=picture)


# The picture


def chosen(frames: Sequence[list[Lines]]) -> list[list[Lines]]:
    """Frames that differ, evenly in time; always the first two and the last one."""
    different = [frames[0]]
    for frame in frames[1:]:
        if frame != different[-1]:
            different.append(frame)
    if len(different) <= MOST_FRAMES:
        return different
    middle, wanted = different[2:-1], MOST_FRAMES - 3
    picked = [middle[len(middle) * number // wanted] for number in range(wanted)]
    return [*different[:2], *picked, different[-1]]


def as_svg(frames: Sequence[list[Lines]], titles: Sequence[str], rows: Sequence[int]) -> str:
    """One picture, in which each frame is visible in turn."""
    width = round(COLUMNS * CELL_WIDTH + 4 * MARGIN)
    tops, top = [], MARGIN
    for count in rows:
        tops.append(top)
        top += (count + 2) * CELL_HEIGHT + MARGIN
    total = FRAME_SECONDS * (len(frames) - 1) + LAST_SECONDS
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" role="img"',
        ' aria-label="A coordinator, two workers and status --watch in four terminals">',
        "<style>text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',",
        f"monospace;fill:{FOREGROUND};white-space:pre}}.t{{fill:#8b949e;font-family:system-ui,",
        "sans-serif}.f{visibility:hidden;animation-timing-function:step-end;",
        f"animation-iteration-count:infinite;animation-duration:{total}s}}",
    ]
    for number in range(len(frames)):
        begin = 100 * number * FRAME_SECONDS / total
        end = 100 * (number + 1) * FRAME_SECONDS / total if number + 1 < len(frames) else 100
        hidden = f"0%{{visibility:hidden}}{begin:.2f}%" if number else "0%"
        after = f"{end:.2f}%{{visibility:hidden}}" if number + 1 < len(frames) else ""
        parts.append(f"@keyframes f{number}{{{hidden}{{visibility:visible}}{after}}}")
        parts.append(f".f{number}{{animation-name:f{number}}}")
    parts.append("@media (prefers-reduced-motion:reduce){.f{animation:none}")
    parts.append(f".f{len(frames) - 1}{{visibility:visible}}}}</style>")
    parts.append(f'<rect width="{width}" height="{top}" fill="#fff" fill-opacity="0"/>')
    for title, count, begin in zip(titles, rows, tops, strict=True):
        height = (count + 2) * CELL_HEIGHT
        parts.append(
            f'<rect x="{MARGIN}" y="{begin}" width="{width - 2 * MARGIN}" height="{height}" rx="8"'
            f' fill="{BACKGROUND}" stroke="{FRAME}"/>'
            f'<text class="t" x="{2 * MARGIN}" y="{begin + 15}">{html.escape(title)}</text>'
        )
    for number, frame in enumerate(frames):
        parts.append(f'<g class="f f{number}">')
        for lines, begin in zip(frame, tops, strict=True):
            for row, line in enumerate(lines):
                parts.append(text_of(line, begin + (row + 2) * CELL_HEIGHT + 2))
        parts.append("</g>")
    return "".join([*parts, "</svg>\n"])


def text_of(line: Sequence[Segment], y: int) -> str:
    """A line of a terminal. Every word has its place, because viewers' fonts differ in width."""
    parts, column = [], 0
    for segment in line:
        for match in re.finditer(r"\S+(?: \S+)*", segment.text):
            x = 2 * MARGIN + (column + match.start()) * CELL_WIDTH
            width = len(match[0]) * CELL_WIDTH
            parts.append(
                f'<text x="{x:.1f}" y="{y}" textLength="{width:.1f}"{look(segment.style)}>'
                f"{html.escape(match[0], quote=False)}</text>"
            )
        column += len(segment.text)
    return "".join(parts)


def look(style: Style | None) -> str:
    if style is None:
        return ""
    colour = f' fill="{style.color.get_truecolor(MONOKAI).hex}"' if style.color else ""
    return colour + ' font-weight="bold"' * bool(style.bold) + ' opacity=".6"' * bool(style.dim)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--steps", type=int, default=60, help="of each block")
    args = parser.parse_args()
    if shutil.which("tmux") is None:
        raise SystemExit("tmux is not installed (Debian: apt-get install tmux)")
    with tempfile.TemporaryDirectory(prefix="record-") as folder:
        picture = args.out.resolve() / "run-page.png"
        frames = chosen(record(Path(folder), args.steps, picture))
        titles = ["the coordinator's machine", "ann's machine", "bob's machine", "anywhere"]
        rows = [max(len(frame[place]) for frame in frames) for place in range(len(titles))]
        recording = args.out / "recording.svg"
        recording.write_text(as_svg(frames, titles, rows), encoding="utf-8")
    for path in (recording, picture):
        click.echo(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
