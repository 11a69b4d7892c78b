"""The run page: what strangers may read of a run, what its operator may do, and that it costs
little however many look at it."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sql
from tests.support.coordinator import Member, SetClock, join, make_run, served, swarm_config

from blocktrain.coordinator.page_settings import PageSettings
from blocktrain.coordinator.service import Service
from blocktrain.protocol.invite import Invite
from blocktrain.protocol.messages import LeaseReturn
from blocktrain.protocol.page_messages import Contributors, NewInvite, Overview, PageEvents

TOKEN = "the operator's token"
OPERATOR = {"authorization": f"Operator {TOKEN}"}
READS = ("overview", "charts", "workers", "events")
SECRET_REASON = "No space left on /home/ann"
FEW_BYTES = 300_000


@dataclass
class Site:
    service: Service
    http: httpx.Client
    token: str = TOKEN

    @property
    def run(self) -> str:
        return self.service.run.id


@pytest.fixture(params=[True], ids=["public"])
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    run = make_run(tmp_path, swarm_config(swarm__keep_updates=8), clock=SetClock())
    draft = Invite(("http://127.0.0.1:7070",), "unknown", None, run.id)
    settings = PageSettings(request.param, "A run", 2.5, lambda: page.token, draft)
    service = Service(run, page=settings)
    with served(service) as address, httpx.Client(base_url=address) as http:
        page = Site(service, http)
        yield page
    run.ledger.close()


def work(site: Site) -> Member:
    """A worker that has trained, and one that has returned its lease for a private reason."""
    member, tired = join(site.service, name="ann"), join(site.service, name="bob")
    member.work()
    site.service.round()
    lease = tired.lease()
    site.service.leases.give_back(
        tired.caller, lease.lease, LeaseReturn(fence=lease.fence, reason=SECRET_REASON)
    )
    site.service.operator.new_invite("train", 3, 1e6)
    return member


def test_strangers_see_names_and_contributions_but_no_ids_and_no_secrets(site: Site):
    member = work(site)
    texts = [site.http.get(f"/v1/page/{each}").raise_for_status().text for each in READS]
    workers = Contributors.model_validate_json(texts[2]).workers
    assert [(each.name, each.updates) for each in workers] == [("ann", 1), ("bob", 0)]
    number = workers[0].number
    texts.append(site.http.get(f"/v1/page/workers/{number}").raise_for_status().text)
    texts.append(site.http.get(f"/v1/page/events?worker={number}").raise_for_status().text)
    with site.http.stream("GET", "/v1/page/live?after=0") as stream:
        lines = stream.iter_lines()
        texts.extend(line for line, _ in zip(lines, range(20), strict=False))
    everything = "\n".join(texts)
    with site.service.run.ledger.read() as tx:
        secrets = [each.id for each in (*tx.members.workers(), *tx.members.invites())]
    secrets += [TOKEN, SECRET_REASON, "lease 1", member.joined.token, member.signer.key.public]
    assert [each for each in secrets if each in everything] == []
    assert "version 1: 1 update, 10 steps" in everything


def test_the_operator_sees_ids_and_reasons(site: Site):
    member = work(site)
    workers = site.http.get("/v1/page/workers", headers=OPERATOR).text
    assert Contributors.model_validate_json(workers).workers[0].worker == member.id
    events = site.http.get("/v1/page/events", headers=OPERATOR).text
    assert SECRET_REASON in events and '"invited"' in events


@pytest.mark.parametrize("site", [False], ids=["private"], indirect=True)
def test_a_private_page_is_for_members_and_the_operator(site: Site):
    member = work(site)
    for each in READS:
        assert site.http.get(f"/v1/page/{each}").status_code == 401
    assert site.http.get("/v1/page/live").status_code == 401
    bearer = {"authorization": f"Bearer {member.joined.token}"}
    for headers in (OPERATOR, bearer):
        answer = site.http.get("/v1/page/overview", headers=headers)
        assert Overview.model_validate_json(answer.text).public is False
    ids = site.http.get("/v1/page/workers", headers=bearer).text
    assert member.id not in ids  # only the operator sees them
    assert site.http.get("/health").json()["status"] == "ok"


def test_only_the_operator_acts_and_every_action_is_an_event(site: Site):
    member = work(site)
    actions: list[tuple[str, object]] = [
        ("control", {"control": "paused"}),
        ("control", {"control": "draining"}),
        ("control", {"control": "running"}),
        ("ban", {"worker": member.id}),
        ("unmerge", {"worker": member.id}),
        ("invites", {"role": "train", "uses": 2, "days": 1.5}),
    ]
    others = ["", "Operator wrong", f"Operator {TOKEN}x", f"Bearer {member.joined.token}"]
    others.append(f"Invite {site.service.operator.invite('train', 1, 1e6)}")
    before = site.service.reports.last_event()
    for path, message in actions:
        for other in others:
            headers = {"authorization": other} if other else {}
            answer = site.http.post(f"/v1/operator/{path}", json=message, headers=headers)
            assert answer.status_code == 401, (path, other)
    assert site.http.get("/v1/operator/invites").status_code == 401
    assert site.service.reports.last_event() == before
    answers = [
        site.http.post(f"/v1/operator/{path}", json=message, headers=OPERATOR)
        for path, message in actions
    ]
    assert {answer.status_code for answer in answers} <= {200, 204}
    made = NewInvite.model_validate_json(answers[-1].text)
    assert made.command == f"blocktrain worker {made.invite}" and made.qr.startswith("<svg")
    assert join(site.service, name="new", invite=Invite.decode(made.invite).secret)
    revoked = site.http.post(f"/v1/operator/invites/{made.id}/revoke", headers=OPERATOR)
    assert revoked.status_code == 204
    kinds = [event.kind for event in site.service.reports.events(before, 100)]
    assert kinds == [
        "paused",
        "draining",
        "resumed",
        "banned",
        "unmerged",
        "invited",
        "joined",
        "revoked",
    ]


def test_a_replaced_token_is_refused_at_once(site: Site):
    assert site.http.get("/v1/operator/invites", headers=OPERATOR).status_code == 200
    site.token = "another"
    answer = site.http.get("/v1/operator/invites", headers=OPERATOR)
    assert answer.status_code == 401 and "blocktrain page" in answer.json()["reason"]
    site.token = ""  # no operator at all
    assert site.http.get("/v1/operator/invites", headers=OPERATOR).status_code == 401


def test_the_files_are_small_cached_and_run_no_foreign_code(site: Site):
    index = site.http.get("/")
    policy = index.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "<style" not in index.text and "onclick" not in index.text
    folder = Path(__file__).resolve().parents[2] / "src" / "blocktrain" / "coordinator" / "page"
    files = [site.http.get(f"/page/{file.name}") for file in folder.iterdir()]
    assert all(file.status_code == 200 for file in files)
    assert sum(len(file.content) for file in files) < FEW_BYTES
    for file in files:
        assert "://" not in file.text.replace("http://www.w3.org/2000/svg", "")
        again = site.http.get(file.url, headers={"if-none-match": file.headers["etag"]})
        assert again.status_code == 304
    packed = site.http.get("/page/style.css", headers={"accept-encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    plain = site.http.get("/page/style.css", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers and plain.content == packed.content


def test_many_viewers_cost_one_read_of_the_ledger(site: Site):
    work(site)
    statements: list[str] = []

    @sql.event.listens_for(site.service.run.ledger.engine, "before_cursor_execute")
    def executed(connection: object, cursor: object, text: str, *rest: object) -> None:
        statements.append(text)

    site.http.get("/v1/page/overview")
    once = len(statements)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: site.http.get("/v1/page/overview"), range(200)))
    assert {answer.status_code for answer in answers} == {200}
    assert len(statements) <= 3 * once  # it is read again after a while, not by each of them


def test_events_are_filtered_and_searched_in_parts(site: Site):
    with site.service.run.ledger.write() as tx:
        for number in range(12_000):
            tx.events.add(1e9 + number, "merged" if number % 4_000 else "lost", block=number % 2)
    found, before, requests = [], None, 0
    while before != 1:
        query = "kinds=lost&block=0" + (f"&before={before}" if before else "")
        answer = site.http.get(f"/v1/page/events?{query}").text
        page = PageEvents.model_validate_json(answer)
        found += [event.number for event in page.events]
        before, requests = page.searched_to, requests + 1
    assert found == [8_001, 4_001, 1] and requests == 3
    unknown = site.http.get("/v1/page/events?kinds=lost,stolen")
    assert unknown.status_code == 422 and "stolen" in json.loads(unknown.text)["reason"]
    assert site.http.get("/v1/page/events?worker=7").status_code == 404
