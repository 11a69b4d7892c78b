import os
import subprocess
import sys
from pathlib import Path

import pytest

from blocktrain.environment import lower_priority
from blocktrain.worker.neighbours import neighbours

KILLED = """
import os, signal, sys
from pathlib import Path
from blocktrain.worker.neighbours import neighbours
with neighbours(Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_on_one_machine_share_its_cores(tmp_path: Path):
    with neighbours(tmp_path) as first:
        assert (first.count(), first.threads(2), first.threads(8)) == (1, 2, 7)
        with neighbours(tmp_path) as second:
            assert (first.count(), second.count()) == (2, 2)
            assert [first.threads(cores) for cores in (1, 2, 3, 8)] == [1, 1, 1, 3]
        assert first.count() == 1


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_a_killed_worker_does_not_count(tmp_path: Path):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert list(tmp_path.iterdir())
    with neighbours(tmp_path) as left, neighbours(tmp_path):
        assert left.count() == 2


@pytest.mark.skipif(not hasattr(os, "getpriority"), reason="no niceness")
def test_priority_is_only_ever_lowered():
    code = "from blocktrain.environment import *; import os; lower_priority({}); lower_priority(0);"
    code += "print(os.getpriority(os.PRIO_PROCESS, 0))"
    before = os.getpriority(os.PRIO_PROCESS, 0)
    run = [sys.executable, "-c", code.format(before + 1 if before < 19 else 19)]
    assert int(subprocess.run(run, capture_output=True, check=True).stdout) == min(19, before + 1)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    lower_priority(0)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
