"""Measures the run page with many workers and events, in a real browser on loopback.

    PYTHONPATH=src:. python bench/run_page.py --out DIR [--workers 1000] [--events 10000]

A real coordinator serves a ledger with so many workers, events and merged updates, while a thread
adds 20 events per second. Chromium opens the page several times with an empty cache, then stays
live on each view. Measured: the first paint, the bytes transferred until the page is live and has
shown all views, and the longest task of the page's main thread (the browser reports those of 50 ms
and more). Then so many viewers follow the live stream, from many loopback addresses, and the
coordinator's processor time is compared with that without viewers. Writes run_page.json into DIR.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page
from sqlalchemy import insert, text, update
from tests.support.browser import chromium

from blocktrain.ledger.ledger import Ledger
from blocktrain.ledger.schema import (
    LeaseRow,
    ScoreRow,
    UpdateRow,
    WorkerRow,
    blocks,
    events,
    leases,
    scores,
    updates,
    versions,
    workers,
)
from coordinator_server import BLOCKS, Running, found, server
from quality import provenance

VIEWS = ("run", "workers", "events")
VERSIONS = 500  # per block, each of one update
EVENTS_PER_SECOND = 20
LIVE_SECONDS = 12.0  # on each view
VIEWERS_PER_ADDRESS = 50
LONG_TASKS = """
window.longTasks = [];
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) window.longTasks.push(entry.duration);
}).observe({type: "longtask", buffered: true});
"""
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"


def fill(db: str, worker_count: int, event_count: int) -> None:
    """A run of an hour with so many workers and events, and thousands of merged updates."""
    ledger, now, draw = Ledger(db), time.time(), random.Random(0)
    begin = now - 3600
    names = [f"worker{number:010d}" for number in range(worker_count)]
    people = [
        WorkerRow(
            id=name, public_key=name, name=f"machine {number} of somebody", device="cpu",
            role="train", joined=begin + number, seen=now - draw.random() * 5, batches_merged=2,
            updates_merged=2,
        )
        for number, name in enumerate(names)
    ]  # fmt: skip
    with ledger.write() as tx:
        tx.connection.execute(text("UPDATE runs SET created = :begin"), {"begin": begin})
        tx.connection.execute(insert(workers), [vars(each) for each in people])
        first = {each.block: each for each in tx.versions.all()}
        for block in range(BLOCKS):
            _merged(tx.connection, block, names, begin, draw)
            weights = first[block].weights
            tx.connection.execute(
                insert(versions).values(
                    block=block, version=VERSIONS, weights=weights.name, weights_size=weights.size,
                    merged_batches=VERSIONS, created=now,
                )
            )  # fmt: skip
        marks = [
            ScoreRow(
                number=number, block=None, versions="[1]", split="valid", windows="w",
                ce=5.0 - number / 100, worker=names[0], time=begin + 17 * number,
            )
            for number in range(1, 200)
        ]  # fmt: skip
        tx.connection.execute(insert(scores), [vars(each) for each in marks])
        rows = [_event(draw, names, begin + 3600 * n / event_count) for n in range(event_count)]
        tx.connection.execute(insert(events), rows)
    ledger.close()


def _merged(connection: Any, block: int, names: list[str], begin: float, draw: Any) -> None:
    held, sent = [], []
    for version in range(1, VERSIONS + 1):
        lease, worker, when = f"l{block}x{version}", draw.choice(names), begin + 7 * version
        held.append(
            LeaseRow(
                id=lease, worker=worker, block=block, base_version=version - 1, first_batch=version,
                steps=1, schedule_start=version, schedule_stride=1, fence=version, deadline=when,
                state="submitted", created=when - 5,
            )
        )  # fmt: skip
        sent.append(
            UpdateRow(
                lease=lease, worker=worker, block=block, base_version=version - 1, steps=1,
                offer="{}", signature="s", state="merged", loss=5.0 - version / 200, weight=1.0,
                committed=when, merged_into=version,
            )
        )  # fmt: skip
    connection.execute(insert(leases), [vars(each) for each in held])
    connection.execute(insert(updates), [vars(each) for each in sent])
    connection.execute(
        update(blocks)
        .where(blocks.c.block == block)
        .values(version=VERSIONS, merged_batches=VERSIONS, next_batch=VERSIONS + 1)
    )


def _event(draw: random.Random, names: list[str], when: float) -> dict[str, Any]:
    kind = draw.choice(["leased", "uploaded", "merged", "merged", "lost", "refused", "joined"])
    worker = None if kind == "merged" else draw.choice(names)
    detail = "10 steps from batch 1200 (lease 1a1f5b71d88mvwhnzexvodji4t3)"
    return {"time": when, "kind": kind, "worker": worker, "block": draw.randrange(BLOCKS),
            "detail": detail}  # fmt: skip


@contextmanager
def activity(db: str, worker_count: int) -> Iterator[None]:
    """Events go on, and workers are seen, for as long as this lasts."""
    ledger, stop, draw = Ledger(db), threading.Event(), random.Random(1)
    names = [f"worker{number:010d}" for number in range(worker_count)]

    def write() -> None:
        while not stop.wait(1 / EVENTS_PER_SECOND):
            with ledger.write() as tx:
                event = _event(draw, names, time.time())
                tx.connection.execute(insert(events), [event])
                tx.members.touch_worker(event["worker"] or names[0], time.time())

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        ledger.close()


def visit(browser: Browser, address: str) -> dict[str, Any]:
    """Open the page with an empty cache, and stay live on each view."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.add_init_script(LONG_TASKS)
    page = context.new_page()
    received = count_bytes(page)
    began = time.perf_counter()
    page.goto(f"{address}/")
    page.wait_for_selector("#connection.good")
    live_seconds = time.perf_counter() - began
    first = {"paint_ms": page.evaluate(PAINT), "live_seconds": live_seconds}
    first["first_view_bytes"] = sum(received.values())
    for view in VIEWS:
        page.evaluate(f"location.hash = '{view}'")
        page.wait_for_timeout(1500)
    first["all_views_bytes"] = sum(received.values())
    longest = {"start": max(page.evaluate("window.longTasks.splice(0)"), default=0.0)}
    for view in VIEWS:
        page.evaluate(f"location.hash = '{view}'")
        page.wait_for_timeout(1000 * LIVE_SECONDS)
        longest[view] = max(page.evaluate("window.longTasks.splice(0)"), default=0.0)
    context.close()
    return {**first, "longest_task_ms": longest}


def count_bytes(page: Page) -> dict[str, int]:
    """Bytes on the wire by request, as they arrive."""
    received: dict[str, int] = {}
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")

    def add(event: dict[str, Any]) -> None:
        name = event["requestId"]
        received[name] = received.get(name, 0) + int(event.get("encodedDataLength", 0))

    session.on("Network.dataReceived", add)
    session.on("Network.responseReceived", lambda event: add(event | event["response"]))
    return received


def processor_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def follow(address: str, viewers: int, process: int) -> dict[str, float]:
    """The coordinator's processor time per second, without viewers and with so many."""
    place = urlsplit(address)

    async def one(number: int) -> int:
        source = f"127.0.1.{1 + number // VIEWERS_PER_ADDRESS}"
        reader, writer = await asyncio.open_connection(
            place.hostname, place.port, local_addr=(source, 0)
        )
        writer.write(b"GET /v1/page/live HTTP/1.1\r\nHost: bench\r\n\r\n")
        count = 0
        try:
            while data := await reader.read(65536):
                count += len(data)
                received[number] = count
        finally:
            writer.close()
        return count

    async def busy(seconds: float) -> float:
        before = processor_seconds(process)
        await asyncio.sleep(seconds)
        return (processor_seconds(process) - before) / seconds

    received: dict[int, int] = {}
    idle = await busy(10.0)
    tasks = []
    for number in range(viewers):
        tasks.append(asyncio.create_task(one(number)))
        await asyncio.sleep(0.004)
    await asyncio.sleep(5.0)
    before, watched = sum(received.values()), await busy(20.0)
    rate = (sum(received.values()) - before) / 20.0
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {"idle": idle, "watched": watched, "bytes_per_second": rate, "following": len(received)}


def measure(running: Running, args: argparse.Namespace) -> dict[str, Any]:
    with chromium() as browser:
        visits = [visit(browser, running.address) for _ in range(args.visits)]
    cost = asyncio.run(follow(running.address, args.viewers, running.process))
    return {"visits": visits, "processor": cost}


def table(result: dict[str, Any]) -> str:
    visits, cost = result["visits"], result["processor"]

    def spread(name: str) -> str:
        values = sorted(each[name] for each in visits)
        return f"median {statistics.median(values):.0f}, worst {values[-1]:.0f}"

    longest = max(each["longest_task_ms"]["start"] for each in visits)
    while_live = max(each["longest_task_ms"][view] for each in visits for view in VIEWS)
    return "\n".join(
        [
            f"first paint, ms: {spread('paint_ms')}",
            f"bytes until live: {spread('first_view_bytes')}",
            f"bytes with all views: {spread('all_views_bytes')}",
            f"longest task, ms (0: below 50): live {while_live:.0f}, at the start {longest:.0f}",
            f"processor seconds per second: {cost['idle']:.3f} without viewers,"
            f" {cost['watched']:.3f} with {cost['following']}, which receive"
            f" {cost['bytes_per_second'] / 1e6:.2f} MB/s together",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--events", type=int, default=10_000)
    parser.add_argument("--viewers", type=int, default=1000)
    parser.add_argument("--visits", type=int, default=5)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        db = f"sqlite:///{folder / 'ledger.db'}"
        found(folder, db, numbers=1000, keep_updates=0)  # whose offers are not real
        fill(db, args.workers, args.events)
        with server(folder, db) as running, activity(db, args.workers):
            result = measure(running, args)
    result = {**provenance(), "workers": args.workers, "events": args.events, **result}
    (args.out / "run_page.json").write_text(json.dumps(result, indent=2))
    print(table(result))


if __name__ == "__main__":
    main()
