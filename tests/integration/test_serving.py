"""A model across processes: the same bytes as on one machine, whoever dies on the way."""

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
from tests.support.processes import Processes
from tests.support.ring import Ring
from tests.support.training import stop_after

from blocktrain.config import load_config
from blocktrain.numerics.sampling import Sampling
from blocktrain.serve.router.first_block import generate
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.device import resolve
from blocktrain.training.run_session import open_session
from blocktrain.training.stored_models import load_stack

PROMPT = "The module"
LONG = 150  # bytes: more than two windows
STAGES = {"one": "1", "two": "2-3", "spare": "2-3"}
PATIENCE_SECONDS = 2.0
LONGEST_PAUSE = {"kill": 3.0, "freeze": 6.0}


@pytest.fixture(scope="module", params=["tiny", "tiny-cascade"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained a little, so that its bytes are not all the same."""
    config = load_config(f"configs/{request.param}.toml", ["train.steps=30"])
    folder = tmp_path_factory.mktemp(request.param) / "run"
    session = open_session(config, folder)
    session.train_in_turn(list(range(config.block_count)), lambda progress: None, lambda: False)
    return folder


@pytest.fixture(scope="module")
def alone(run: Path) -> dict[float, str]:
    """What the model says on one machine, by temperature."""
    stack = load_stack(RunDir.open(run), resolve("cpu", "fp32"))
    return {
        temperature: bytes(
            generate(stack, PROMPT.encode(), LONG, Sampling(temperature, seed=7))
        ).decode(errors="replace")
        for temperature in (0.0, 1.0)
    }


@pytest.fixture(scope="module")
def shared_ring(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    with (
        Processes(tmp_path_factory.mktemp("ring")) as processes,
        closing(
            Ring(
                processes, run, STAGES, "--patience", str(PATIENCE_SECONDS), "--prefill-chunk", "4"
            )
        ) as ring,
    ):
        yield ring


@pytest.fixture
def ring(shared_ring: Ring) -> Ring:
    """Whole again, whatever the test before has done to it."""
    shared_ring.mend()
    return shared_ring


def asked(temperature: float, **more: object) -> dict[str, object]:
    fields = {"prompt": PROMPT, "max_tokens": LONG, "temperature": temperature, "seed": 7}
    return {**fields, **more}


def test_a_ring_generates_the_same_text_as_one_process(ring: Ring, alone: dict[float, str]) -> None:
    for temperature, text in alone.items():
        assert ring.text(**asked(temperature, mode="ar")) == text
        assert ring.text(**asked(temperature, mode="speculative")) == text
        assert ring.text(**asked(temperature, mode="speculative", drafts="ngram")) == text
        assert ring.text(**asked(temperature, mode="sweep", passes=0)) == text
    one_pass = ring.ask(**asked(0.0, mode="sweep", passes=1)).json()
    assert one_pass["usage"]["completion_tokens"] == LONG
    assert one_pass["blocktrain"]["traversals"] <= 4  # one for every window, not for every byte


def test_many_requests_at_once_get_the_text_each_gets_alone(
    ring: Ring, alone: dict[float, str]
) -> None:
    modes = ["ar", "speculative", "sweep"] * 4
    with ThreadPoolExecutor(len(modes)) as clients:
        texts = clients.map(lambda mode: ring.text(**asked(1.0, mode=mode, passes=0)), modes)
    assert list(texts) == [alone[1.0]] * len(modes)


@pytest.mark.parametrize("harm", ["kill", "freeze"])
def test_a_stage_lost_on_the_way_is_replaced_and_the_output_stays(
    ring: Ring, alone: dict[float, str], harm: str
) -> None:
    """Killed it is missed at once, silent after two heartbeats."""
    text, moments = "", []
    for piece in ring.stream(**asked(1.0, mode="ar")):
        text += piece
        moments.append(time.monotonic())
        if len(moments) == 20:
            getattr(ring.busy(), harm)()
    assert text == alone[1.0]
    assert ring.known() == len(STAGES) - 1
    assert max(after - before for before, after in pairwise(moments)) < LONGEST_PAUSE[harm]


def test_a_shared_beginning_is_computed_once_and_again_by_stages_that_lack_it(
    ring: Ring, run: Path
) -> None:
    prompt = "The module that is described here "
    fields = {**asked(1.0, mode="ar"), "prompt": prompt, "max_tokens": 20}
    stack = load_stack(RunDir.open(run), resolve("cpu", "fp32"))
    alone = bytes(generate(stack, prompt.encode(), 20, Sampling(1.0, seed=7)))
    for cached_tokens in (0, len(prompt) - 1, 0):
        answer = ring.ask(**fields).json()
        assert answer["choices"][0]["text"] == alone.decode(errors="replace")
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": cached_tokens}
        if cached_tokens:
            for name in ("two", "spare"):
                ring.stages[name].kill()
            ring.wait(1)
            ring.mend()


def test_without_a_stage_there_is_a_clear_error_and_service_comes_back_with_it(
    ring: Ring, alone: dict[float, str]
) -> None:
    ring.stages["two"].kill()
    ring.stages["spare"].kill()
    ring.wait(1)
    started = time.monotonic()
    answer = ring.ask(**asked(0.0))
    assert answer.status_code == 503
    assert "no stage has block 2, 3" in answer.json()["error"]["message"]
    assert PATIENCE_SECONDS < time.monotonic() - started < PATIENCE_SECONDS + 2.0
    ring.start("two")
    ring.wait(2)
    assert ring.text(**asked(0.0)) == alone[0.0]


def test_a_stage_of_another_version_is_refused(ring: Ring, run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    config = RunDir.open(run).config
    fresh = RunDir.create(tmp_path / "fresh", config)
    session = open_session(config.with_settings(train__seed=config.train.seed), fresh.path)
    session.train_in_turn([1], lambda progress: None, stop_after(1))
    shutil.rmtree(other / "block-1")
    shutil.copytree(fresh.path / "block-1", other / "block-1")
    ring.stages["one"].kill()
    ring.wait(2)
    ring.start("one", other)
    answer = ring.until_it_says("another version", **asked(0.0))
    assert answer.status_code == 503
