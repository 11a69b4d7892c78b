"""One worker for each of several devices; here each device is the CPU."""

from pathlib import Path
from typing import Any

import pytest

from blocktrain.cli.device_workers import work_on_all
from blocktrain.errors import DeviceError
from blocktrain.protocol.invite import Invite

NOBODY = Invite(("http://127.0.0.1:1",), "secret", None, "a1b2c3d4").encode()


def ignored(device: str, event: dict[str, Any]) -> None:
    pass


def test_if_one_device_fails_all_stop_and_its_error_is_raised(tmp_path: Path):
    devices = ["cpu", "cuda:7"]
    with pytest.raises(DeviceError, match=r"1-cuda-7: device 'cuda:7' is not available"):
        work_on_all(NOBODY, devices, [], tmp_path, ignored, lambda: False)
