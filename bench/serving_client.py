"""A client of a served model as a small program, for a host that the bench cannot reach directly.

    python serving_client.py URL

Reads requests as JSON lines, and answers each with the output and the time of every piece.
{"at_once": N, "request": {...}} sends N requests at the same time and answers with their duration.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

SECONDS = 600.0


def streamed(client: httpx.Client, request: dict[str, Any]) -> dict[str, Any]:
    """One answer: its text, when each piece came, and what it cost."""
    text, moments, cost = "", [], {}
    began = time.perf_counter()
    with client.stream("POST", "/v1/completions", json={**request, "stream": True}) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(event["error"])
            cost = event.get("blocktrain", cost)
            said = "".join(choice["text"] for choice in event["choices"])
            if said:
                text += said
                moments.append(time.perf_counter() - began)
    seconds = time.perf_counter() - began
    return {"text": text, "moments": moments, "seconds": seconds, "cost": cost}


def together(client: httpx.Client, request: dict[str, Any], count: int) -> dict[str, Any]:
    """So many of the same at once, each with a seed of its own."""

    def ask(seed: int) -> int:
        answer = client.post("/v1/completions", json={**request, "seed": seed})
        answer.raise_for_status()
        written: int = answer.json()["usage"]["completion_tokens"]
        return written

    began = time.perf_counter()
    with ThreadPoolExecutor(count) as threads:
        written = sum(threads.map(ask, range(count)))
    return {"bytes": written, "seconds": time.perf_counter() - began}


def main() -> None:
    limits = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=sys.argv[1], timeout=SECONDS, limits=limits) as client:
        for line in sys.stdin:
            asked = json.loads(line)
            if "at_once" in asked:
                told = together(client, asked["request"], asked["at_once"])
            else:
                told = streamed(client, asked)
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
