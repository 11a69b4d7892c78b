"""Gate 5: every result has two baselines beside it, paired by seed on the same windows."""

import argparse
import importlib
import json
import math
import sys
from pathlib import Path
from typing import ClassVar

import pytest

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "configs" / "wikitext2-38m.toml"


sys.path.insert(0, str(ROOT / "bench"))  # the benches import each other by name


@pytest.fixture(scope="module")
def quality():
    return importlib.import_module("quality")


def asked(*options: str) -> list[str]:
    return ["quality.py", "--config", str(CONFIG), "--out", "unused", *options]


def variants(quality, monkeypatch, *options: str) -> list:
    monkeypatch.setattr(sys, "argv", asked(*options))
    return quality.variants(quality.parse())


def test_both_baselines_stand_beside_the_blocks(quality, monkeypatch):
    found = variants(quality, monkeypatch)
    assert [v.name for v in found] == [
        "end-to-end, 12 layers", "end-to-end, 3 layers", "blocks, 4 x 3 layers",
    ]  # fmt: skip


def test_a_grid_gives_every_kind_at_every_point(quality, monkeypatch):
    found = variants(
        quality, monkeypatch, "--set", "model.dropout=0.1", "--grid", "model.blocks=2,6"
    )
    assert [v.name for v in found if v.kind == "denoise"] == [
        "blocks, 2 x 6 layers, model.blocks=2", "blocks, 6 x 2 layers, model.blocks=6",
    ]  # fmt: skip
    assert all("model.dropout=0.1" in v.settings for v in found)


def test_a_cascade_stands_beside_what_fits_its_workers(quality, monkeypatch):
    kinds = ["--kinds", "cascade", "fitting", "swarm", "--stale", "50", "250"]
    found = variants(quality, monkeypatch, *kinds)
    assert [v.name for v in found] == [
        "cascade, 2+2+2+6 layers, tail 4, lead 0.25, 50 stale",
        "cascade, 2+2+2+6 layers, tail 4, lead 0.25, 250 stale",
        "end-to-end, 6 layers",
        "product of 4 x end-to-end, 6 layers",
    ]
    assert len({str(v.identity(0)) for v in found}) == 4


def test_kinds_are_trained_scored_and_found_again(quality, monkeypatch, tmp_path):
    """The real thing at its smallest: every kind, one table, nothing trained twice."""
    options = asked(
        "--config", str(ROOT / "configs" / "tiny.toml"), "--out", str(tmp_path),
        "--kinds", *quality.KINDS, "--stale", "2", "--workers", "1",
        "--windows", "4", "--splits", "test",
        "--set", "model.layers=2", "model.blocks=2", "model.width=32", "model.window=32",
        "objective.tail=1", "train.steps=4", "train.batch=4", "train.precision=fp32",
    )  # fmt: skip
    monkeypatch.setattr(sys, "argv", options)
    monkeypatch.setattr("blocktrain.training.evaluate.FITTED_BYTES", 1024)  # the score is nobody's
    quality.main()
    report = json.loads((tmp_path / "quality.json").read_text())
    assert [result["kind"] for result in report["results"]] == list(quality.KINDS)
    assert all(math.isfinite(ce) for r in report["results"] for ce in r["test"]["scores"].values())
    written = (tmp_path / "quality.json").stat().st_mtime_ns
    quality.main()
    assert (tmp_path / "quality.json").stat().st_mtime_ns == written


def test_every_kind_is_tuned_alike_on_valid(quality, monkeypatch):
    """The best point differs by kind; only the first seed tries them all; test plays no part."""
    found = variants(quality, monkeypatch, "--grid", "model.dropout=0.0,0.1")
    valid = {
        "end-to-end, 12 layers, model.dropout=0.1": 1.0,
        "blocks, 4 x 3 layers, model.dropout=0.0": 1.0,
    }

    class Recorded:
        asked: ClassVar[list] = []

        def measure(self, variants: list, seeds: list[int]) -> list[dict]:
            self.asked += [(v.name, seed) for seed in seeds for v in variants]
            return [
                {"variant": v.name, "point": v.point, "seed": seed,
                 "valid": {"scores": {"none final": valid.get(v.name, 2.0)}}}
                for seed in seeds for v in variants
            ]  # fmt: skip

    results = quality.choose(Recorded(), found, [0, 1, 2])
    names = {r["variant"] for r in results}
    assert "end-to-end, 12 layers, model.dropout=0.1" in names
    assert "blocks, 4 x 3 layers, model.dropout=0.0" in names
    assert len(names) == 3
    assert len(results) == 9
    assert len(Recorded.asked) == 6 + 2 * 3


def test_gaps_are_paired_by_seed(quality):
    def result(variant: str, seed: int, ce: float, digest: str = "aa") -> dict:
        scores = {"digest": digest, "scores": {"none final": ce}}
        return {
            "variant": variant, "kind": variant.partition(",")[0], "point": "", "seed": seed,
            "parameters": 1_000_000, "test": scores, "local": {},
        }  # fmt: skip

    rows = quality.table(
        [
            result("end-to-end, 12 layers", 0, 1.0),
            result("end-to-end, 12 layers", 1, 2.0),
            result("blocks", 0, 1.1),
            result("blocks", 1, 2.1),
        ],
        "test",
        "end-to-end",
    )
    assert rows[-1] == "| blocks | 1.00M | none final | 1.6000 ± 6.3530 | 0.1000 ± 0.0000 |"
    with pytest.raises(SystemExit, match="other windows"):
        quality.table(
            [result("end-to-end", 0, 1.0), result("blocks", 0, 1.1, "bb")], "test", "end-to-end"
        )


def test_a_reference_of_several_readings_is_compared_reading_by_reading(quality):
    def result(kind: str, scores: dict[str, float]) -> dict:
        return {
            "variant": kind, "kind": kind, "point": "", "seed": 0, "parameters": 1_000_000,
            "test": {"digest": "aa", "scores": scores}, "local": {"its own loss": 0.5},
        }  # fmt: skip

    alone = result("denoise", {"mean product": 1.0, "mean final": 1.5})
    many = result("workers", {"mean product": 1.01, "mean final": 1.4, "other": 2.0})
    rows = quality.table([alone, many], "test", "denoise")
    gaps = [row.split("|")[-2].strip() for row in rows if row.startswith("| workers")]
    assert gaps == ["0.0100", "-0.1000", "-", "-"]


def test_what_the_json_holds_is_not_trained_again(quality, tmp_path, monkeypatch):
    monkeypatch.setattr(quality, "provenance", lambda: {"commit": "here"})
    variant = quality.Variant("blocks", "denoise", ("model.blocks=2",), "", ())
    held = {
        "variant": "blocks", "seed": 3, "identity": variant.identity(3),
        "commit": "elsewhere", "valid": {"scores": {"mean product": 1.0}},
    }  # fmt: skip
    path = tmp_path / "held.json"
    path.write_text(json.dumps({"results": [held]}))
    arguments = {"config": CONFIG, "out": tmp_path / "runs", "json": path}
    bench = quality.Bench(argparse.Namespace(**arguments, splits=["valid"]))
    assert bench.measure([variant], [3]) == [held]
    assert not (tmp_path / "runs").exists()
