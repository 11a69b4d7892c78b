"""A run across processes, as users start it: coordinator, workers, status, fetch."""

import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.support.blobs import whole
from tests.support.waiting import wait_for

from blocktrain.cli.coordinator_commands import FINISHED
from blocktrain.coordinator.folder import CoordinatorFolder
from blocktrain.protocol.invite import Invite
from blocktrain.storage import tensor_file

ROOT = Path(__file__).resolve().parents[2]
BLOCKTRAIN = [sys.executable, "-m", "blocktrain.cli.main"]
SMALL = ["model.layers=2", "model.blocks=2", "model.width=32", "model.window=32", "train.batch=4",
         "train.warmup=2", "train.precision=fp32", "train.device=cpu", "train.steps=24",
         "train.save_every=1000", "swarm.first_steps=5", "swarm.most_steps=7",
         "objective.tail=1"]  # fmt: skip
SECONDS = 90


@pytest.fixture
def home(tmp_path: Path) -> Path:
    words = (ROOT / "LICENSE").read_bytes()
    (tmp_path / "corpus.txt").write_bytes(words * 8)
    return tmp_path


def settings(home: Path, *extra: str) -> list[str]:
    values = [*SMALL, f"data.source=text:{home}/corpus.txt", *extra]
    return ["--config", "tiny", *(part for value in values for part in ("--set", value))]


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "BLOCKTRAIN_CACHE": str(home / "cache"), "OMP_NUM_THREADS": "1"}


def run(home: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BLOCKTRAIN, *map(str, arguments)],
        capture_output=True, text=True, timeout=SECONDS, cwd=home, env=environment(home),
        check=False,
    )  # fmt: skip


def call(home: Path, *arguments: object) -> str:
    done = run(home, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def mistake(home: Path, *arguments: object) -> str:
    """What a command says that cannot be done."""
    done = run(home, *arguments)
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stderr
    return done.stderr


@contextmanager
def coordinator(
    home: Path, *options: str, checks: tuple[str, ...] = ("--no-validate",)
) -> Iterator[dict]:
    process = subprocess.Popen(
        [*BLOCKTRAIN, "coordinator", "--listen", "127.0.0.1:0", "--data-dir", "coordinator",
         "--json", *checks, *options],
        stdout=subprocess.PIPE, text=True, cwd=home, env=environment(home),
    )  # fmt: skip
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.terminate()
        process.communicate(timeout=30)


def start_worker(home: Path, invite: str, *options: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*BLOCKTRAIN, "worker", invite, "--nice", "0", *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=home,
        env=environment(home),
    )  # fmt: skip


def finish(*workers: subprocess.Popen) -> None:
    for worker in workers:
        told, _ = worker.communicate(timeout=SECONDS)
        assert worker.returncode == 0, told


TOKENS = ["model.layer=llama", "data.tokenizer=bpe:300"]


@pytest.mark.parametrize(("extra", "options"), [([], []), (TOKENS, ["--plain-http"])])
def test_one_worker_per_block_gives_the_local_run_s_weights(
    home: Path, extra: list[str], options: list[str]
):
    with coordinator(home, *settings(home, *extra), *options) as told:
        scheme = "http://" if options else "https://"
        assert all(address.startswith(scheme) for address in told["addresses"])
        own, other = f"text:{home}/corpus.txt", "stdlib"
        workers = [
            start_worker(home, told["invite"], "--blocks", str(block), "--data", source)
            for block, source in enumerate([own, other])
        ]
        heard = [worker.communicate(timeout=SECONDS)[0] for worker in workers]
        assert ["is not the run's text" in lines for lines in heard] == [False, True], heard
        status = json.loads(call(home, "status", told["invite"], "--json"))
        assert status["state"] == "finished"
        assert [block["progress"] for block in status["blocks"]] == [1.0, 1.0]
        assert all(block["ce"] is None and block["ce_note"] for block in status["blocks"])
        call(home, "fetch", told["invite"], "--out", "fetched")
    call(home, "train", *settings(home, *extra), "--out", "local")
    files = [sorted((home / name / "tokenizer").glob("*")) for name in ("fetched", "local")]
    assert len(files[0]) == len(files[1]) == bool(extra)
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]
    fetched = load_file(home / "fetched" / "model.safetensors")
    for block in range(2):
        for name, tensor in load_file(next(home.glob(f"local/block-{block}/v*"))).items():
            assert np.array_equal(fetched[f"block.{block}.{name}"], tensor), name
    call(home, "export", "fetched", "--out", "exported")
    assert "with --data" in mistake(home, "eval", "exported")
    assert ce_of(home, "fetched") < 5.0


RELAY = ["objective.kind=cascade", "objective.tail=1", "objective.order=relay"]
IN_TURNS = ["objective.kind=turns", "objective.turn_steps=8"]


@pytest.mark.parametrize("extra", [RELAY, IN_TURNS], ids=["relay", "turns"])
def test_one_worker_for_all_blocks_in_order_gives_the_local_run_s_weights(
    home: Path, extra: list[str]
):
    with coordinator(home, *settings(home, *extra)) as told:
        finish(start_worker(home, told["invite"]))
        assert "FLOP" in call(home, "status", told["invite"])
        call(home, "fetch", told["invite"], "--out", "fetched")
    call(home, "train", *settings(home, *extra), "--out", "local")
    fetched = load_file(home / "fetched" / "model.safetensors")
    for block in range(2):
        newest = max(home.glob(f"local/block-{block}/v*"))
        for name, tensor in load_file(newest).items():
            assert np.array_equal(fetched[f"block.{block}.{name}"], tensor), name


def test_a_dense_codec_trains_the_model_as_well_in_fewer_bytes(home: Path):
    with coordinator(home, *settings(home, "swarm.codec=int8")) as told:
        finish(*(start_worker(home, told["invite"], "--blocks", str(b)) for b in range(2)))
        call(home, "fetch", told["invite"], "--out", "fetched")
    sizes = sent_sizes(home)
    whole = (home / "fetched" / "model.safetensors").stat().st_size / 2
    assert len(sizes) >= 8
    assert all(size < whole / 3.5 for size in sizes), (whole, sizes)
    call(home, "train", *settings(home), "--out", "local")
    assert ce_of(home, "fetched") == pytest.approx(ce_of(home, "local"), abs=0.02)


def test_sparse_both_ways_and_a_worker_that_is_restarted(home: Path):
    """Every worker fetches its block whole once, and follows differences from then on, also in its
    second life; the bits are the coordinator's."""
    with coordinator(home, *settings(home, "swarm.codec=sparse", "train.steps=60")) as told:
        other = start_worker(home, told["invite"], "--blocks", "1", "--folder", "other")
        first = start_worker(home, told["invite"], "--blocks", "0", "--folder", "mine")
        wait_for(lambda: version_of(home, 0) > 1)
        first.terminate()
        first.communicate(timeout=60)
        again = start_worker(home, told["invite"], "--blocks", "0", "--folder", "mine")
        finish(other, again)
        status = status_of(home, told)
        shown = call(home, "status", told["invite"])
        call(home, "fetch", told["invite"], "--out", "fetched")
    assert " 0.0 MB" not in shown and "kB" in shown and "fp32 would be" in shown
    fetched = load_file(home / "fetched" / "model.safetensors")
    with (
        closing(CoordinatorFolder(home / "coordinator").open().ledger) as ledger,
        ledger.read() as tx,
    ):
        held = [tx.versions.get(block) for block in range(2)]
    blobs = CoordinatorFolder(home / "coordinator").open().blobs
    for block, moved in enumerate(block["moved"] for block in status["blocks"]):
        size, made = held[block].weights.size, held[block].version
        assert moved["down_whole"] == size
        assert moved["down_raw"] > 2 * size
        assert 0 < moved["down_differences"] < made * size / 50
        assert moved["up_raw"] >= made * size
        assert moved["up"] < moved["up_raw"] / 30  # last words are longer
        weights = tensor_file.decode(whole(blobs, held[block].weights))
        for name, tensor in weights.items():
            assert np.array_equal(fetched[f"block.{block}.{name}"], tensor), name
    assert len(status["workers"]) == 2
    assert ce_of(home, "fetched") < 5.0


def version_of(home: Path, block: int) -> int:
    with (
        closing(CoordinatorFolder(home / "coordinator").open().ledger) as ledger,
        ledger.read() as tx,
    ):
        return tx.blocks.states()[block].version


def sent_sizes(home: Path) -> list[int]:
    ledger = sqlite3.connect(home / "coordinator" / "ledger.db")
    offers = [json.loads(offer) for (offer,) in ledger.execute("SELECT offer FROM updates")]
    ledger.close()
    return [offer["recipe"]["size"] for offer in offers]


def ce_of(home: Path, run: str, windows: int = 8) -> float:
    text = f"text:{home}/corpus.txt"
    told = call(home, "eval", run, "--windows", windows, "--data", text, "--json")
    return float(json.loads(told)["ce"])


def test_a_cascade_is_trained_scored_and_looked_at(home: Path):
    with coordinator(home, *settings(home, "objective.kind=cascade", *TOKENS)) as told:
        judging = call(
            home, "invite", "new", "--evaluate", "--data-dir", "coordinator", "--uses", "1"
        ).strip()
        early = start_worker(home, judging, "--evaluate", "--until", "0m", "--folder", "both")
        said, _ = early.communicate(timeout=SECONDS)
        assert early.returncode == 130 and "time is over" in said, said
        judge = start_worker(home, judging, "--evaluate", "--name", "judge", "--folder", "both")
        trainer = start_worker(home, told["invite"], "--folder", "both")  # one place, two roles
        finish(start_worker(home, told["invite"]), trainer)
        judged, _ = judge.communicate(timeout=SECONDS)
        assert judge.returncode == 0, judged
        assert "scoring versions" in judged and ": CE " in judged
        status = json.loads(call(home, "status", told["invite"], "--json"))
        assert all(block["ce"] < 4.0 for block in status["blocks"])
        assert {worker["role"] for worker in status["workers"]} == {"train", "evaluate"}
        trained, tokens = sum(w["bytes_trained"] for w in status["workers"]), 2 * 24 * 4 * 32
        assert 1.2 * tokens < trained < 3 * tokens
        call(home, "fetch", told["invite"], "--out", "fetched")
        assert status["ce"] == pytest.approx(ce_of(home, "fetched", 256), abs=1e-4)
        shown = call(home, "status", told["invite"])
        assert "judge" in shown and "finished" in shown
        listed = json.loads(call(home, "invite", "list", "--data-dir", "coordinator", "--json"))
        assert sorted(invite["role"] for invite in listed) == ["evaluate", "train"]


def test_a_coordinator_goes_on_where_it_stopped_and_a_banned_worker_stays_out(home: Path):
    with coordinator(home, *settings(home, "train.steps=400")) as told:
        worker = start_worker(home, told["invite"], "--name", "first")
        wait_for(lambda: status_of(home, told)["blocks"][0]["version"] > 0)
    with coordinator(home) as again:
        assert again["run"] == told["run"]
        assert not list((home / "coordinator").rglob("*.key"))  # of its certificates
        known = status_of(home, again)["workers"][0]
        assert known["name"] == "first"
        worker.terminate()
        worker.communicate(timeout=60)
        call(home, "ban", known["worker"], "--data-dir", "coordinator")
        folder = next((home / "cache" / "workers").glob("*/0"))
        refused = start_worker(home, again["invite"], "--folder", str(folder))
        said, _ = refused.communicate(timeout=60)
        assert refused.returncode == 8
        assert "banned" in said
        assert call(home, "backup", "--data-dir", "coordinator", "--out", "saved.tar")
    call(home, "restore", "saved.tar", "--data-dir", "restored")


def start_hostile(home: Path, invite: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.hostile_worker", invite, "--plan", "sign-flip",
         "--folder", str(home / "hostile")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=home,
        env={**environment(home), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_a_hostile_worker_is_removed_from_a_run_that_goes_on(home: Path):
    more = ("train.steps=200", "swarm.codec=int8", "swarm.outer_momentum=0.5")
    with coordinator(home, *settings(home, *more, "swarm.keep_updates=100")) as told:
        hostile = start_hostile(home, told["invite"])

        def merged_updates() -> int:
            workers = status_of(home, told)["workers"]
            return sum(each["updates"] for each in workers if each["name"] == "hostile")

        wait_for(lambda: merged_updates() >= 2, SECONDS)
        honest = start_worker(home, told["invite"], "--name", "honest")
        said = call(home, "ban", "hostile", "--unmerge", "--data-dir", "coordinator")
        assert "banned" in said and "that were merged into versions" in said
        hostile.communicate(timeout=60)
        assert merged_updates() == 0
        finish(honest)
        status = status_of(home, told)
        assert status["state"] == "finished"
        assert [block["progress"] for block in status["blocks"]] == [1.0, 1.0]
        by = {each["name"]: each for each in status["workers"]}
        assert by["hostile"]["bytes_trained"] == 0
        assert by["honest"]["bytes_trained"] == sum(
            block["bytes_trained"] for block in status["blocks"]
        )
        call(home, "fetch", told["invite"], "--out", "fetched")
    assert ce_of(home, "fetched") < 5.0


@pytest.mark.parametrize("level", ["info", "debug"])
def test_a_coordinator_logs_the_events_of_its_run(home: Path, level: str):
    """Each request only at debug."""
    more = [*settings(home, "swarm.most_steps=12"), "--log-format", "json", "--log-level", level]
    said, log = home / "stdout", home / "stderr"
    with (
        said.open("w") as out,
        log.open("w") as errors,
        subprocess.Popen(
            [*BLOCKTRAIN, "coordinator", *more, *IN_FOLDER, "--listen", "127.0.0.1:0",
             "--no-validate"],
            stdout=out, stderr=errors, cwd=home, env=environment(home),
        ) as process,
    ):  # fmt: skip
        joining = re.compile(r"blocktrain worker (\S+)\n")
        wait_for(lambda: joining.search(said.read_text()))
        (invite,) = joining.findall(said.read_text())
        finish(start_worker(home, invite, "--name", "reader"))
        wait_for(lambda: FINISHED in log.read_text())
        process.send_signal(signal.SIGINT)
        process.wait(30)
    lines = log.read_text().splitlines()
    records = [json.loads(line) for line in lines if line]  # click writes an empty one at Ctrl-C
    events = [record for record in records if "event" in record and record["level"] == "info"]
    assert events[0]["message"] == "worker reader joined"
    assert events[-1]["message"] == FINISHED
    versions = [record["message"] for record in events if record["event"] == "merged"]
    for block in range(2):
        own = [text.split(": ")[1] for text in versions if text.startswith(f"block {block}: ")]
        assert own == [f"version {number + 1}" for number in range(len(own))]
        assert len(own) >= 2
    assert "stopping" in [record["message"] for record in records]
    requests = [record for record in records if "POST /v1/join" in record["message"]]
    assert len(requests) == (level == "debug")
    assert not [record for record in records if "traceback" in record]


def status_of(home: Path, told: dict) -> dict:
    return json.loads(call(home, "status", told["invite"], "--json"))


def test_a_coordinator_that_does_not_answer_is_told_at_once(home: Path):
    """Long before it is given up."""
    with coordinator(home, *settings(home)) as told:
        invite = told["invite"]
    for command in (["status", invite], ["fetch", invite, "--out", "out"], ["worker", invite]):
        with subprocess.Popen(
            [*BLOCKTRAIN, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            cwd=home, env=environment(home),
        ) as asking:  # fmt: skip
            line = asking.stdout.readline()
            asking.kill()
        assert line.startswith("no answer from https://127.0.0.1:"), line
        assert ("waiting for" if command[0] == "worker" else "retrying for 60 s") in line


IN_FOLDER = ("--data-dir", "coordinator")


def listed(home: Path) -> list[dict]:
    return json.loads(call(home, "invite", "list", *IN_FOLDER, "--json"))


def test_an_invite_names_the_places_the_coordinator_said_or_others(home: Path):
    with coordinator(home, *settings(home)) as told:
        first = Invite.decode(told["invite"])
        assert "not an address" in mistake(
            home, "invite", "new", *IN_FOLDER, "--address", "no place"
        )
        assert len(listed(home)) == 1  # nothing that could be joined with was made
        made = json.loads(call(home, "invite", "new", *IN_FOLDER, "--json"))
        found = Invite.decode(made["invite"])
        assert (found.addresses, found.fingerprint) == (first.addresses, first.fingerprint)
        assert made["id"] in {invite["invite"] for invite in listed(home)}
        elsewhere = run(home, "invite", "new", *IN_FOLDER, "--address", "127.0.0.1:7171")
        assert Invite.decode(elsewhere.stdout).addresses == ("https://127.0.0.1:7171",)
        assert "invite revoke" in elsewhere.stderr
        assert call(home, "status", made["invite"])
    assert "uses left" in call(home, "invite", "list", *IN_FOLDER).splitlines()[0]


def test_an_invite_that_was_revoked_is_not_printed_again(home: Path):
    with coordinator(home, *settings(home)) as told:
        said = call(home, "invite", "revoke", *IN_FOLDER, told["invite"])
        (revoked,) = listed(home)
        assert said == f"revoked {revoked['invite']}\n"
        assert revoked["revoked"]
    with coordinator(home) as again:
        assert call(home, "status", again["invite"])
    with coordinator(home) as third:
        kept = Invite.decode(third["invite"]).secret
        assert kept == Invite.decode(again["invite"]).secret != Invite.decode(told["invite"]).secret
    other = Invite(("https://host:1",), "secret", None, "another0").encode()
    assert other not in mistake(home, "invite", "revoke", *IN_FOLDER, other)


def test_a_port_that_is_taken_leaves_no_folder_behind(home: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        said = mistake(home, "coordinator", *settings(home), *IN_FOLDER, "--listen", place)
    assert "already in use" in said
    assert not (home / "coordinator").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["worker", "bt1_nonsense"], "mistyped"),
        (["coordinator"], "holds no run"),
        (["invite", "list"], "--data-dir"),
        (["ban", "somebody"], "--data-dir"),
        (["backup", "--out", "saved.tar"], "--data-dir"),
    ],
)
def test_errors_are_one_line(home: Path, arguments: list[str], says: str):
    said = mistake(home, *arguments)
    assert says in said
    assert len(said.splitlines()) == 1
