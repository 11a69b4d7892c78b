from blocktrain.worker.local_block import ReceiveBuffer


def test_one_version_after_another_is_received_into_the_same_memory():
    room = ReceiveBuffer()
    first = room.of(10_000)
    first[:] = bytes(range(100)) * 100
    assert bytes(room.of(10_000)) == bytes(first)
    room.rest()
    again = room.of(10_000)
    again[:] = b"x" * 10_000
    assert bytes(first) == b"x" * 10_000


def test_another_size_is_other_memory_and_leaves_what_is_still_read():
    room = ReceiveBuffer()
    first = room.of(4)
    first[:] = b"read"
    room.of(8)[:] = b"received"
    assert bytes(first) == b"read"


def test_there_may_be_nothing_to_receive():
    assert len(ReceiveBuffer().of(0)) == 0
