"""The run page in a real browser, of a real coordinator with a real worker."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.support.browser import chromium
from tests.support.processes import Processes, Running, free_port

SECONDS = 90.0  # processes that load torch on a busy machine take their time
SETTINGS = ("model.layers=2", "model.blocks=2", "train.steps=100000", "swarm.codec=int8")
HOSTILE = "<script>window.hacked = 1</script> שלום"
VIEWS = ("run", "workers", "events", "operator")
PHONE = {"width": 360, "height": 740}


@dataclass
class Site:
    processes: Processes
    coordinator: Running
    worker: Running
    url: str
    operator: str  # address with the token
    port: int

    def start(self) -> Running:
        return self.processes.coordinator(
            self.processes.folder / "run", self.port, "", "--plain-http", "--no-validate"
        )

    def worker_says(self, text: str, since: int = 0) -> None:
        def said() -> bool:
            return text in self.worker.log.read_text()[since:]

        self.processes.wait_for(f"the worker says {text!r}", said, SECONDS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def site(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    port = free_port()
    with Processes(tmp_path_factory.mktemp("page")) as processes:
        options = [word for setting in SETTINGS for word in ("--set", setting)]
        coordinator = processes.coordinator(
            processes.folder / "run", port, "", "--config", "tiny", "--plain-http",
            "--no-validate", "--title", "Prose & <b>friends</b>", "--reference", "1.5", *options,
        )  # fmt: skip

        def announced() -> bool:
            return '"page"' in coordinator.log.read_text()

        processes.wait_for("the coordinator starts", announced, SECONDS)
        lines = coordinator.log.read_text().splitlines()
        told = json.loads(next(line for line in lines if line.startswith("{")))
        worker = processes.worker(told["invite"], "worker", "", "--name", HOSTILE)
        site = Site(processes, coordinator, worker, told["addresses"][0], told["page"], port)
        site.worker_says('"accepted"')
        yield site


@pytest.fixture
def page(browser: Browser, site: Site) -> Iterator[Page]:
    """A page of its own for each test. The page may complain of lost connections alone."""
    context = browser.new_context()
    page, complaints = context.new_page(), list[str]()
    page.set_default_timeout(1000 * SECONDS)
    expect.set_options(timeout=20_000)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text))
    yield page
    context.close()
    expected = ("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "401 (Unauthorized)")
    assert [text for text in complaints if not any(each in text for each in expected)] == []


def live(page: Page) -> None:
    expect(page.locator("#connection")).to_have_text("live", timeout=1000 * SECONDS)


def go(page: Page, view: str) -> None:
    page.get_by_role("link", name=view.capitalize(), exact=True).click()


def test_a_visitor_sees_the_run_its_workers_and_its_events(site: Site, page: Page):
    page.goto(site.url)
    live(page)
    expect(page.locator("#title")).to_have_text("Prose & <b>friends</b>")
    expect(page.locator(".tile", has_text="Speed")).to_contain_text("tokens/s")
    losses = page.locator("figure", has_text="Loss of each block")
    expect(losses.locator("polyline").first).to_be_visible()
    expect(page.locator("figure", has_text="Score over time")).to_contain_text("--evaluate")
    expect(losses.locator(".note")).to_contain_text("as workers report it")
    losses.locator("summary").click()
    assert losses.locator("tbody tr").count() > 1
    losses.locator("svg").press("ArrowLeft")
    expect(losses.locator("output")).to_contain_text("block")
    blocks = page.get_by_role("table", name="Blocks").locator("tbody tr")
    expect(blocks).to_have_count(2)
    assert "-" not in {cell.strip() for cell in blocks.locator("td").all_inner_texts()}
    speeds = page.locator("figure", has_text="Tokens per second").locator("polyline")
    assert speeds.count() == 1
    traffic = page.get_by_role("table", name="Bytes moved").locator("tbody tr").first
    expect(traffic).to_contain_text(re.compile(r"int8.*[kM]B.*x", re.DOTALL))
    assert page.evaluate("window.hacked") is None


def test_a_hostile_name_is_only_text_and_leads_to_its_worker(site: Site, page: Page):
    page.goto(f"{site.url}/#workers")
    live(page)
    link = page.get_by_role("table", name="Workers").get_by_role("link")
    expect(link).to_have_text(HOSTILE)
    page.get_by_label("Find a worker by name").fill("nobody")
    expect(link).to_have_count(0)
    page.get_by_label("Find a worker by name").fill("script")
    link.click()
    expect(page.locator("h2").first).to_have_text(HOSTILE)
    expect(page.locator(".facts")).to_contain_text("not checked yet")
    expect(page.locator("figure polyline")).to_have_count(1)
    expect(page.get_by_role("button", name="Ban this worker")).to_be_hidden()
    page.reload()  # the address leads to the same worker
    expect(page.locator("h2").first).to_have_text(HOSTILE)
    assert page.evaluate("window.hacked") is None


def test_events_come_by_themselves_and_are_filtered(site: Site, page: Page):
    page.goto(f"{site.url}/#events")
    live(page)
    lines = page.locator(".events li")
    newest = lines.first.get_attribute("data-number")
    expect(lines.first).not_to_have_attribute("data-number", newest or "")
    results = page.locator(".events").get_by_text("new version")
    assert results.count() > 0
    page.get_by_label("results").uncheck()
    expect(results).to_have_count(0)
    expect(lines).to_have_count(1)  # joined
    page.get_by_label("routine").check()
    expect(page.locator(".events").get_by_text("got a lease").first).to_be_visible()
    page.get_by_label("Block", exact=True).select_option("1")
    expect(page.locator(".events .quiet", has_text="block 0")).to_have_count(0)
    page.get_by_label("Find in these events").fill("no such thing")
    expect(lines).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_everything_in_its_width(site: Site, browser: Browser, scheme: str):
    context = browser.new_context(viewport=PHONE, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(site.operator)
    live(page)
    grounds = set()
    for view in VIEWS:
        go(page, view)
        page.wait_for_timeout(300)
        widths = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert widths[0] <= widths[1], view
        grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds == {"rgb(244, 244, 241)" if scheme == "light" else "rgb(19, 21, 24)"}
    context.close()


def test_the_page_survives_a_killed_coordinator(site: Site, page: Page):
    page.goto(site.url)
    live(page)
    site.coordinator.kill()
    expect(page.locator("#connection")).to_contain_text("trying again")
    before = page.locator(".hero strong").inner_text()
    assert before.endswith("done")  # what was known stays
    site.coordinator = site.start()
    live(page)
    position = len(site.worker.log.read_text())
    site.worker_says('"accepted"', position)
    go(page, "events")
    expect(page.locator(".events li").first).to_contain_text("new version")


def confirm(page: Page, button: str, verb: str) -> None:
    page.get_by_role("button", name=button, exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name=verb, exact=True).click()
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_the_operator_pauses_drains_resumes_invites_and_bans(site: Site, page: Page):
    page.goto(f"{site.url}/#operator")
    live(page)
    page.get_by_label("Operator's token").fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator("[role=alert]").first).to_contain_text("token is wrong")
    page.goto(site.operator)
    live(page)
    assert "operator=" not in page.url
    page.get_by_role("button", name="Pause", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("The run is running")).to_be_visible()

    position = len(site.worker.log.read_text())
    confirm(page, "Pause", "Pause")
    expect(page.get_by_text("The run is paused")).to_be_visible()
    site.worker_says("the operator has paused the run", position)
    confirm(page, "Resume", "Resume")
    confirm(page, "Drain", "Drain")
    expect(page.get_by_text("The run is drained")).to_be_visible()
    position = len(site.worker.log.read_text())
    confirm(page, "Resume", "Resume")
    site.worker_says('"accepted"', position)

    page.get_by_label("workers").fill("3")
    confirm(page, "Make invite", "Make invite")
    expect(page.locator(".made code")).to_have_text(re.compile("^blocktrain worker bt1_"))
    assert page.evaluate("document.querySelector('.qr').naturalWidth") > 0
    made = page.get_by_role("table", name="Invites").locator("tbody tr", has_text="3")
    made.get_by_role("button", name="Revoke").first.click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(made.first).to_contain_text("revoked")

    go(page, "workers")
    page.get_by_role("table", name="Workers").get_by_role("link").click()
    confirm(page, "Ban this worker", "Ban")
    expect(page.locator(".facts")).to_contain_text("banned by the operator")
    site.worker_says("the operator has banned this worker")
    confirm(page, "Remove its merged updates", "Remove")
    expect(page.get_by_text(re.compile("Removed [0-9]+ updates? from blocks"))).to_be_visible()
    go(page, "events")
    happenings = (
        "updates taken back", "was banned", "the operator paused the run", "new invite",
        "invite revoked",
    )  # fmt: skip
    for happened in happenings:
        expect(page.locator(".events").get_by_text(happened).first).to_be_visible()
