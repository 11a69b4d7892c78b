"""Measures what hostile workers do to a run: final CE, and leases until they get no more.

    PYTHONPATH=src:. python bench/attacks.py --out DIR [--defence off] [--plans sign-flip unchanged]
        [--codecs none int8 sparse] [--objectives denoise cascade] [--crews 1-of-4 2-of-6]
        [--seeds 0 1] [--jobs 2]

Every cell is a run of 4 blocks with the coordinator's own service and the workers' own code over
HTTP, in virtual time (tests/support/stepped_run.py). The same cell gives about the same numbers;
which leases are replayed is drawn in secret. Hostile workers follow one plan of
tests/support/attacks.py from the first step; those of one crew act together. A clean run of each
crew, with only honest workers, is measured first with every seed of --clean-seeds.

Writes DIR/attacks.jsonl, one line per run, after every run; called again, it measures only what is
missing. Prints a table: CE minus that of the clean run with the same seed, mean over seeds; in
brackets, the median of the leases that hostile workers got, or "all" if they got some to the end;
for backdoors also how often the answer followed the trigger. `--table` prints it without measuring.
"""

import argparse
import json
import math
import sqlite3
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.support.attacks import PLANS
from tests.support.stepped_run import Member, SteppedRun

from blocktrain.config import Config, load_config
from blocktrain.data.corpus import load_corpus
from blocktrain.training.device import resolve
from quality import provenance

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = {"denoise": "tiny", "cascade": "tiny-cascade"}
SPEEDS = (6.1, 5.9, 6.0, 5.7, 6.3, 5.8)  # steps per second
CREWS = {"1-of-4": (1, 4), "2-of-6": (2, 6), "3-of-6-one-invite": (3, 6)}
CLEAN = "honest"
VALIDATORS = {"on": ("honest",), "off": ()}
SMALL = {
    "model__width": 32, "model__heads": 2, "model__window": 32, "train__steps": 200,
    "train__device": "cpu", "swarm__first_steps": 6,
    "swarm__most_steps": 6,
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    objective: str
    codec: str
    crew: str
    plan: str
    seed: int
    defence: str  # on or off
    precision: str = "fp32"  # of the workers; validators compute in fp32

    def config(self) -> Config:
        base = load_config(ROOT / "configs" / f"{CONFIGS[self.objective]}.toml", [])
        return base.with_settings(
            **SMALL, swarm__codec=self.codec, train__seed=self.seed,
            train__precision=self.precision,
        )  # fmt: skip

    def members(self) -> list[Member]:
        hostile, total = CREWS[self.crew]
        shared = "shared" if self.crew.endswith("one-invite") else ""
        names = [f"hostile-{n}" for n in range(hostile)] + [
            f"honest-{n}" for n in range(total - hostile)
        ]
        return [
            Member(name, self.plan, speed, shared if name.startswith("hostile") else "")
            if name.startswith("hostile")
            else Member(name, CLEAN, speed)
            for name, speed in zip(names, SPEEDS, strict=False)
        ]


def measure(cell: Cell) -> dict[str, Any]:
    config, began = cell.config(), time.process_time()
    corpus = load_corpus(config.data)
    with (
        tempfile.TemporaryDirectory() as folder,
        SteppedRun(
            Path(folder),
            config,
            corpus,
            cell.members(),
            cell.seed,
            VALIDATORS[cell.defence],
            compute=resolve("cpu", cell.precision),
        ) as run,
    ):
        run.play()
        workers = [
            {
                "name": worker.member.name,
                "plan": worker.member.plan,
                "leases": worker.leases,
                "last_lease": worker.last_lease,
                "ended": worker.ended,
                "updates": updates_of(Path(folder), worker.session.worker),
            }
            for worker in run.workers
        ]
        return {
            **asdict(cell),
            "ce": run.ce(),
            "backdoor": run.backdoor_success(),
            "finished": run.finished,
            "virtual_seconds": run.seconds,
            "cpu_seconds": time.process_time() - began,
            "workers": workers,
        }


def updates_of(folder: Path, worker: str) -> dict[str, Any]:
    """A worker's updates by state, and the reasons of refusals."""
    ledger = sqlite3.connect(folder / "ledger.db")
    wanted = "SELECT state, reason, clip FROM updates WHERE worker = ?"
    rows = ledger.execute(wanted, [worker]).fetchall()
    doubts = "SELECT suspicion, unexplained FROM workers WHERE id = ?"
    [(suspicion, unexplained)] = ledger.execute(doubts, [worker])
    ledger.close()
    states = [state for state, *_ in rows]
    return {
        "states": {state: states.count(state) for state in sorted(set(states))},
        "reasons": sorted({reason for state, reason, _ in rows if state == "refused"}),
        "clipped": sum(clip is not None for *_, clip in rows),
        "suspicion": suspicion,
        "unexplained": unexplained,
    }


# Tables


def table(results: Sequence[dict[str, Any]], defence: str) -> Iterator[str]:
    """One row per plan; columns by crew, objective and codec."""
    results = [each for each in results if each["defence"] == defence]
    results = [each for each in results if each["precision"] == "fp32"]
    columns = sorted({column_of(each) for each in results})
    clean = {(column_of(each), each["seed"]): each["ce"] for each in results if is_clean(each)}
    yield f"\nDefence {defence}"
    yield "| plan | " + " | ".join(" ".join(column) for column in columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    scores = [[ce for (where, _), ce in clean.items() if where == column] for column in columns]
    yield "| clean, CE ± sd over seeds | " + " | ".join(map(spread, scores)) + " |"
    backdoors = [
        [each["backdoor"] for each in results if is_clean(each) and column_of(each) == column]
        for column in columns
    ]
    answered = [f"{statistics.mean(each):.1%}" if each else "" for each in backdoors]
    yield "| clean, answer follows the trigger | " + " | ".join(answered) + " |"
    for plan in PLANS:
        cells = [
            [each for each in results if each["plan"] == plan and column_of(each) == column]
            for column in columns
        ]
        if plan != CLEAN and any(cells):
            yield f"| {plan} | " + " | ".join(summary(runs, clean) for runs in cells) + " |"


def summary(runs: list[dict[str, Any]], clean: dict[tuple[Any, int], float]) -> str:
    gaps = [
        run["ce"] - clean[column_of(run), run["seed"]]
        for run in runs
        if (column_of(run), run["seed"]) in clean
    ]
    if not gaps:
        return ""
    worst = "NaN" if any(map(math.isnan, gaps)) else f"{statistics.mean(gaps):+.3f}"
    leases = [
        each["leases"] if was_stopped(each, run) else math.inf
        for run in runs
        for each in run["workers"]
        if each["plan"] != CLEAN
    ]
    median = statistics.median_high(leases)
    cell = f"{worst} ({'all' if math.isinf(median) else median})"
    if runs[0]["plan"].startswith("backdoor"):
        cell += f", {statistics.mean(run['backdoor'] for run in runs):.0%}"
    return cell


def was_stopped(worker: dict[str, Any], run: dict[str, Any]) -> bool:
    """Whether a worker was excluded, or got no lease in the second half of the run."""
    if worker["ended"] not in (None, "finished"):
        return True
    return bool(worker["last_lease"] < run["virtual_seconds"] / 2)


def honest(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What became of the updates of honest workers, by whether there was a hostile one."""
    yield "\n| honest workers | runs | updates | refused | clipped | workers excluded |"
    yield "|---" * 6 + "|"
    groups = [(each["precision"], each["codec"], is_clean(each)) for each in results]
    for group in sorted(set(groups)):
        runs = [run for run, its in zip(results, groups, strict=True) if its == group]
        workers = [each for run in runs for each in run["workers"] if each["plan"] == CLEAN]
        counts = [each["updates"] for each in workers]
        refused = Counter(reason[:60] for each in counts for reason in each["reasons"])
        excluded = sum(each["ended"] not in (None, "finished") for each in workers)
        precision, codec, is_alone = group
        yield (
            f"| {'alone' if is_alone else 'beside hostile ones'}, {precision}, {codec}"
            f" | {len(runs)} | {sum(sum(each['states'].values()) for each in counts)}"
            f" | {sum(each['states'].get('refused', 0) for each in counts)} {dict(refused) or ''}"
            f" | {sum(each.get('clipped', 0) for each in counts)} | {excluded} |"
        )


def spread(values: list[float]) -> str:
    if len(values) < 2:
        return ", ".join(f"{value:.3f}" for value in values)
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def is_clean(result: dict[str, Any]) -> bool:
    return bool(result["plan"] == CLEAN)


def column_of(result: dict[str, Any]) -> tuple[str, str, str]:
    return result["crew"], result["objective"], result["codec"]


def cell_of(result: dict[str, Any]) -> Cell:
    return Cell(**{name: result[name] for name in Cell.__dataclass_fields__ if name in result})


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--defence", nargs="+", choices=VALIDATORS, default=["off"])
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--codecs", nargs="+", default=["none", "int8", "sparse"])
    parser.add_argument("--objectives", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--crews", nargs="+", choices=CREWS, default=["1-of-4", "2-of-6"])
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--clean-seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run later")
    parser.add_argument("--table", action="store_true", help="print the table, measure nothing")
    return parser.parse_args()


def wanted(args: argparse.Namespace) -> list[Cell]:
    return [
        Cell(objective, codec, crew, plan, seed, defence, args.precision)
        for defence in args.defence
        for plan in sorted(args.plans, key=lambda plan: plan != CLEAN)
        for seed in (args.clean_seeds if plan == CLEAN else args.seeds)
        for crew in args.crews
        for objective in args.objectives
        for codec in args.codecs
    ]


def main() -> None:
    args = parsed()
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "attacks.jsonl"
    results = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    known, until = set(map(cell_of, results)), time.monotonic() + 60 * args.minutes
    missing = [cell for cell in wanted(args) if cell not in known and not args.table]
    here = provenance()
    with ProcessPoolExecutor(args.jobs, max_tasks_per_child=20) as pool:
        running = {pool.submit(measure, cell): cell for cell in missing}
        for future in as_completed(running):
            results.append({**future.result(), **here})
            with file.open("a") as out:
                out.write(json.dumps(results[-1]) + "\n")
            print(f"{running[future]}: CE {results[-1]['ce']:.4f}", flush=True)
            if time.monotonic() > until:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    results = [{"precision": "fp32", **each} for each in results]
    for defence in args.defence:
        print("\n".join(table(results, defence)))
    print("\n".join(honest([each for each in results if each["defence"] == "on"])))


if __name__ == "__main__":
    main()
