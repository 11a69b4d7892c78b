"""How weights are held is a choice that reaches every process of a served run."""

from pathlib import Path

import httpx
from tests.support.models import awake_stack
from tests.support.processes import Processes, free_port
from tests.support.ring import SECONDS
from tests.support.serving import CPU, run_locally

from blocktrain.config import Config
from blocktrain.numerics.sampling import Sampling
from blocktrain.serve.ring.compute import BlockSource, StageCompute
from blocktrain.serve.router.decode import GenerationRequest
from blocktrain.serve.router.first_block import FirstBlock
from blocktrain.storage.run_dir import RunDir

PROMPT, WRITTEN, SEED = "The module", 200, 7


def exported(folder: Path, config: Config) -> RunDir:
    run = RunDir.create(folder, config)
    run.write_exported(
        [
            {name: weight.detach().numpy() for name, weight in block.named_parameters()}
            for block in awake_stack(config).blocks
        ]
    )
    return run


def said_here(run: RunDir, held: str) -> str:
    """By the same blocks in one process."""
    source = BlockSource(run, held)
    stages = [StageCompute.load(source, range(1, run.config.block_count), CPU)]
    request = GenerationRequest(PROMPT.encode(), WRITTEN, "ar", sampling=Sampling(1.0, seed=SEED))
    ((text, _),) = run_locally(
        FirstBlock(StageCompute.load(source, range(1), CPU)), stages, [request]
    )
    return text.decode(errors="replace")


def test_a_router_and_the_stages_it_starts_hold_weights_in_8_bits(tmp_path: Path, config: Config):
    run = exported(tmp_path / "run", config)
    assert said_here(run, "int8") != said_here(run, "full")  # else nothing would be seen
    address = f"127.0.0.1:{free_port()}"
    fields = {"prompt": PROMPT, "max_tokens": WRITTEN, "mode": "ar", "temperature": 1, "seed": SEED}
    with (
        Processes(tmp_path) as processes,
        httpx.Client(base_url=f"http://{address}", timeout=60.0) as client,
    ):
        processes.serve(run.path, address, "--weights", "int8")

        def serves() -> bool:
            try:
                return client.get("/health").status_code == 200
            except httpx.TransportError:
                return False

        processes.wait_for("a router with its stage", serves, SECONDS)
        answer = client.post("/v1/completions", json=fields).json()
    assert answer["choices"][0]["text"] == said_here(run, "int8")
