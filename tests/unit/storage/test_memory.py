import mmap
import sys

import pytest

from blocktrain.storage.memory import advise, own_memory


def test_what_is_written_is_read():
    memory = own_memory(10_000)
    memory[5_000:5_003] = b"abc"
    assert (len(memory), memory[5_000:5_003]) == (10_000, b"abc")


@pytest.mark.skipif(sys.platform != "linux", reason="what others know is not known here")
def test_the_system_may_have_it_back():
    memory = own_memory(mmap.PAGESIZE)
    memory.madvise(mmap.MADV_FREE)  # refused where the memory is shared


def test_advice_that_nobody_knows_is_not_given():
    memory = own_memory(10)
    advise(memory, "MADV_OF_NO_SYSTEM")
    advise(memory, "MADV_HUGEPAGE")
