"""A coordinator's certificate: its key is in memory alone."""

import ssl
import tempfile
from pathlib import Path

import pytest

from blocktrain.coordinator.process import own_tls
from blocktrain.coordinator.service import Service


def test_nothing_of_its_key_stays_on_the_disk(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    context = own_tls(service, ["127.0.0.1"])
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before
    assert context.minimum_version == ssl.TLSVersion.TLSv1_3
