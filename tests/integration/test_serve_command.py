"""`blocktrain serve` as an operator runs it: behind TLS, with its page in a real browser."""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from openai import OpenAI
from tests.conftest import ROOT
from tests.support.browser import chromium
from tests.support.certificate import Pair, written
from tests.support.processes import Processes, free_port

from blocktrain.cli.main import cli
from blocktrain.config import load_config
from blocktrain.errors import ConfigError
from blocktrain.numerics.sampling import Sampling
from blocktrain.serve.router.first_block import generate
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.device import resolve
from blocktrain.training.run_session import open_session
from blocktrain.training.stored_models import load_stack

SECONDS = 60.0  # processes that load torch on a busy machine take their time
KEY = "a key for tests"
LONG = 60  # bytes
ORIGIN = "https://page.example"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained a little, so that it says letters."""
    small = ["model.layers=2", "model.blocks=2", "train.steps=40", "train.device=cpu"]
    config = load_config(ROOT / "configs" / "tiny.toml", small)
    folder = tmp_path_factory.mktemp("served") / "small"
    session = open_session(config, folder)
    session.train_in_turn(list(range(config.block_count)), lambda progress: None, lambda: False)
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return written(tmp_path_factory.mktemp("tls"), time.time())


@pytest.fixture(scope="module")
def address(run: Path, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server over TLS, its blocks in processes of their own. It has opened the chat page in
    the user's browser: a script that writes the address into a file."""
    folder = tmp_path_factory.mktemp("server")
    browser, opened = folder / "browser", folder / "opened"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    address = f"127.0.0.1:{free_port()}"
    tls = ("--tls-cert", pair.certificate, "--tls-key", pair.key)
    with (
        pytest.MonkeyPatch.context() as changed,
        Processes(folder) as processes,
        httpx.Client(base_url=f"https://{address}", verify=pair.client_context()) as client,
    ):
        changed.setenv("BROWSER", f"{browser} %s")
        options = ("--api-key", KEY, "--origin", ORIGIN, "--open")
        server = processes.serve(run, address, *options, *tls)

        def ready() -> bool:
            try:
                return client.get("/health").status_code == 200
            except httpx.TransportError:
                assert server.code is None, server.log.read_text()
                return False

        processes.wait_for("the server answers", ready, SECONDS)
        assert f"serving small at https://{address}/v1" in server.log.read_text()
        processes.wait_for("the chat page is opened", opened.exists, SECONDS)
        assert opened.read_text().strip() == f"https://{address}/"
        yield address


def test_openais_client_gets_the_models_text_over_tls(run: Path, pair: Pair, address: str) -> None:
    stack = load_stack(RunDir.open(run), resolve("cpu", "fp32"))
    text = bytes(generate(stack, b"The ", LONG, Sampling(1.0, seed=5)))
    with OpenAI(
        base_url=f"https://{address}/v1",
        api_key=KEY,
        max_retries=0,
        http_client=httpx.Client(verify=pair.client_context(), timeout=SECONDS),
    ) as client:
        answer = client.completions.create(
            model="small", prompt="The ", max_tokens=LONG, temperature=1.0, seed=5
        )
    assert answer.choices[0].text == text.decode(errors="replace")


def test_another_certificate_and_plain_http_are_refused(address: str) -> None:
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(f"https://{address}/health")
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"http://{address}/health")


def test_pages_of_the_named_origin_may_use_the_api(pair: Pair, address: str) -> None:
    with httpx.Client(base_url=f"https://{address}", verify=pair.client_context()) as client:
        for origin, allowed in ((ORIGIN, ORIGIN), ("https://other.example", None)):
            answer = client.get("/health", headers={"origin": origin})
            assert answer.headers.get("access-control-allow-origin") == allowed


@pytest.mark.parametrize("origin", ["page.example", "https://page.example/", "https:///"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    result = CliRunner().invoke(cli, ["serve", "RUN", "--origin", origin])
    assert result.exit_code == 2
    assert "is not an origin like https://example.org" in result.output


def test_the_page_streams_an_answer_and_shows_its_cost(address: str) -> None:
    complaints: list[str] = []
    with chromium() as browser:
        page = browser.new_page(ignore_https_errors=True)
        page.on("console", lambda said: complaints.append(said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"https://{address}/")
        assert page.is_visible("#hint")
        page.fill("#prompt", "The ")
        page.press("#prompt", "Enter")
        page.fill(".unlock input", KEY)  # it sends the prompt again
        page.press(".unlock input", "Enter")
        page.wait_for_selector(".cost")
        assert page.locator(".said").count() == 1 and page.input_value("#key") == KEY
        page.click("#clear")
        assert page.is_visible("#hint") and not page.locator(".said").count()
        page.fill("#most", str(LONG))
        page.fill("#seed", "5")
        page.select_option("#mode", "ar")
        assert page.input_value("#kind") == "text"  # no model here was taught to converse
        page.select_option("#kind", "chat")
        page.evaluate(GROWTH)
        page.fill("#prompt", "Hello")
        page.press("#prompt", "Enter")
        page.wait_for_selector(".cost")
        assert page.inner_text(".asked") == "Hello"
        lengths = page.evaluate("window.lengths")
        assert len(set(lengths)) > 5 and lengths == sorted(lengths)  # as it came, not at the end
        assert "traversals" in page.inner_text(".cost") and "block 1" in page.inner_text(".cost")
        assert page.inner_text("#health") == "ready, 1 stage"
        page.set_viewport_size({"width": 360, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") == 360  # a phone's whole width
        given, needed = page.evaluate(WIDTHS)
        assert given >= needed
    assert [said for said in complaints if "401" not in said] == []


def test_the_page_shows_traversals_probabilities_and_sweeps_and_survives_a_reload(
    run: Path, address: str
) -> None:
    complaints: list[str] = []
    with chromium() as browser:
        page = browser.new_page(ignore_https_errors=True, viewport={"width": 900, "height": 480})
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"https://{address}/")
        page.fill("#key", KEY)
        page.press("#key", "Enter")
        page.fill("#seed", "1234567890")
        clipped = page.evaluate(CLIPPED)
        assert clipped == []
        page.fill("#most", str(LONG))
        page.fill("#prompt", "The ")
        page.press("#prompt", "Enter")
        page.wait_for_selector(".cost")
        groups = page.locator(".traversal")
        stack = load_stack(RunDir.open(run), resolve("cpu", "fp32"))
        text = bytes(generate(stack, b"The ", LONG, Sampling(0.7, seed=1234567890))).decode()
        assert "".join(groups.all_text_contents()) == text
        cost = page.inner_text(".cost")
        assert f"{groups.count()}\ntraversals" in cost or f"{groups.count()} traversals" in cost
        assert "bytes/s if only the network took time" in cost
        groups.nth(1).locator("span").first.hover()
        first_line, *others = page.inner_text("#tip").splitlines()
        assert "log-probability -" in first_line and len(others) >= 4
        assert page.is_hidden("#note")
        page.select_option("#mode", "sweep")
        assert page.is_visible("#note")  # on what a sweep from nothing yields
        page.select_option("#drafts", "head")
        assert page.is_hidden("#note")
        assert page.locator("#drafts option").all_inner_texts() == ["nothing", "head"]
        page.fill("#most", "900")
        page.press("#most", "Enter")
        page.fill("#prompt", "And ")
        page.press("#prompt", "Enter")
        page.locator(".said").nth(1).locator(".bar").wait_for()
        assert page.evaluate(
            "document.querySelectorAll('.bar')[1].getBoundingClientRect().bottom"
            " <= document.getElementById('scroll').getBoundingClientRect().bottom"
        )
        before = page.inner_text("#talk")
        page.reload()
        page.wait_for_selector(".said")
        assert page.inner_text("#talk") == before and page.input_value("#key") == KEY
        page.click("#clear")
        page.reload()
        assert page.is_visible("#hint") and not page.locator(".said").count()
    assert complaints == []


CLIPPED = """() => [...document.querySelectorAll("#settings input[type=number]")]
  .filter((field) => field.scrollWidth > field.clientWidth).map((field) => field.id)"""


WIDTHS = """() => {
  const mode = document.getElementById("mode"), given = mode.offsetWidth;
  mode.style.cssText = "flex: none; width: max-content";
  return [given, mode.offsetWidth];
}"""


GROWTH = """() => {
  window.lengths = [];
  const talk = document.getElementById("talk");
  const note = () => window.lengths.push(talk.querySelector(".said p")?.textContent.length ?? 0);
  new MutationObserver(note).observe(talk, {childList: true, subtree: true});
}"""


def test_a_server_reports_loading_each_request_and_stopping(run: Path, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        profile = tmp_path / "trace.json"
        server = processes.serve(run, "127.0.0.1:0", "--api-key", KEY, "--profile", profile)
        said = server.log.read_text
        processes.wait_for("it says that it loads", lambda: "loading 2 blocks" in said(), SECONDS)
        processes.wait_for("it serves", lambda: "serving small" in said(), SECONDS)
        models = said().split("serving small at ")[1].split(",")[0] + "/models"
        assert httpx.get(models, headers={"x-request-id": "mine-1"}).status_code == 401
        processes.wait_for("it is logged", lambda: "mine-1" in said(), SECONDS)
        (line,) = [line for line in said().splitlines() if "mine-1" in line]
        assert line.split()[1:3] == ["INFO", "blocktrain.serve.http.http_server:"]
        assert "GET /v1/models: 401 in " in line
        headers = {"authorization": f"Bearer {KEY}"}
        body = {"prompt": "The ", "max_tokens": 5}
        url = models.replace("/models", "/completions")
        assert httpx.post(url, json=body, headers=headers, timeout=SECONDS).status_code == 200
        server.process.send_signal(signal.SIGINT)
        processes.wait_for("it ends", lambda: server.code is not None, SECONDS)
    assert "WARNING blocktrain.serve.http.http_server: stopping" in said()
    traced = {event["name"] for event in json.loads(profile.read_text())["traceEvents"]}
    assert {"block 0: layers", "block 1: layers", "round trip"} & traced
    assert "block 1  " in said().split("profile: ")[1]
    assert "is gone" not in said()  # of stages that the server itself ended


def test_a_certificate_alone_is_refused_before_anything_is_loaded(run: Path, pair: Pair) -> None:
    alone = {"BLOCKTRAIN_SERVE_TLS_CERT": str(pair.certificate)}
    result = CliRunner().invoke(cli, ["serve", str(run)], env=alone)
    assert isinstance(result.exception, ConfigError)
    assert "--tls-cert and --tls-key belong together" in str(result.exception)
