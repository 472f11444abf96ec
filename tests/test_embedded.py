"""The parts of the engine for one process: what they keep, what they lose, what they refuse."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import ml_dtypes
import numpy as np
import pytest

from kvsplice import Request
from kvsplice.embedded import EmbeddedSessions, EventBus, Hasher, JsonLines, MemoryStore, ObjectKey, PagedCache
from kvsplice.embedded import disk as disk_module
from kvsplice.embedded.disk import DiskTier
from kvsplice.hashing import chained_chunk_hashes
from kvsplice.ports import Policy

REQUEST = Request("r", [], "m")


def key(n, scope=b"s", rank=0):
    return ObjectKey(scope, b"%032d" % n, rank)


def content(n, size=16):
    return np.full(size, n, np.float32)


def fetch(store, keys, policy=Policy.SPARSE, locks=1):
    """Submit, and poll until the answer is there."""
    ticket = store.submit(keys, policy, locks, REQUEST)
    deadline = time.monotonic() + 20
    while (fetched := store.poll(ticket)) is None:
        assert time.monotonic() < deadline, "the store did not answer"
        time.sleep(0.001)
    return fetched


def filled(capacity=10, disk=None, numbers=(0, 1, 2, 3)):
    store = MemoryStore(capacity * 64, disk)
    for n in numbers:
        assert store.put(key(n), [content(n)])
    return store


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "loaded"),
    [
        (Policy.PREFIX, [True, True, False, False]),
        (Policy.SEGMENTED_PREFIX, [True, True, False, True]),
        (Policy.SPARSE, [True, True, False, True]),
    ],
)
def test_a_policy_says_what_is_loaded_and_locked(policy, loaded):
    store = filled()
    asked = [key(0), key(1), key(9), key(3)]
    fetched = fetch(store, asked, policy, locks=2)
    assert fetched.loaded.tolist() == loaded
    assert store.read_locks == 2 * sum(loaded)
    store.release([k for k, each in zip(asked, loaded, strict=True) if each], 2)
    assert store.read_locks == 0


def test_the_longest_unused_object_makes_room_unless_it_is_locked():
    store = filled(capacity=4)
    fetch(store, [key(0)])
    fetch(store, [key(1)])
    store.release([key(1)], 1)
    store.put(key(4), [content(4)])
    store.put(key(5), [content(5)])
    assert [n for n in range(6) if key(n) in store] == [0, 1, 4, 5]
    assert store.stats()["evictions"] == 2
    [[array]] = store.read([key(0)])
    assert np.array_equal(array, content(0))


def test_what_finds_no_room_is_not_held_and_pushes_nothing_out():
    store = filled(capacity=4)
    fetch(store, [key(n) for n in range(3)])
    assert not store.put(key(5), [content(5, 32)])
    assert not store.put(key(6), [content(6, 1000)])
    assert [n for n in range(7) if key(n) in store] == [0, 1, 2, 3]


def test_reading_without_a_lock_and_releasing_too_often_are_refused():
    store = filled()
    with pytest.raises(ValueError, match="without a read lock"):
        store.read([key(0)])
    fetch(store, [key(0), key(1)])
    with pytest.raises(ValueError, match="fewer than 2 read locks"):
        store.release([key(0)], 2)
    with pytest.raises(ValueError, match="fewer than 1 read locks"):
        store.release([key(1), key(2)], 1)
    assert store.read_locks == 2, "a refused release released something"


def test_dropping_leaves_what_is_locked():
    store = filled()
    fetch(store, [key(0)])
    assert store.drop([key(0), key(1), key(77)]) == 1
    assert key(0) in store
    assert key(1) not in store


def test_a_negative_capacity_is_refused():
    with pytest.raises(ValueError, match="capacity"):
        MemoryStore(-1)


# -- disk -------------------------------------------------------------------------------------------------------------


def test_a_disk_that_does_not_keep_up_neither_fills_the_memory_nor_holds_up_reads(tmp_path, monkeypatch):
    disk = DiskTier(tmp_path, 1 << 20)
    store = MemoryStore(8 * content(0).nbytes, disk)
    store.put(key(0), [content(0)])
    store.flush()
    write, go_on = disk.write, threading.Event()

    def stalled(*arguments):
        go_on.wait(30)
        write(*arguments)

    monkeypatch.setattr(disk, "write", stalled)
    try:
        for n in range(1, 20):
            assert store.put(key(n), [content(n)])
        stats = store.stats()
        assert stats["disk_skipped_writes"] == 15
        assert key(0) not in store
        assert fetch(store, [key(0)]).loaded.all(), "a read waits for writes, or finds no room"
    finally:
        go_on.set()
    store.flush()
    assert store.stats()["disk_objects"] == 1 + 4
    store.close()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_an_object_comes_back_from_the_disk_as_it_was(tmp_path, dtype):
    arrays = [np.arange(24).reshape(2, 3, 4).astype(dtype), np.arange(5).astype(dtype)]
    store = MemoryStore(1 << 20, DiskTier(tmp_path, 1 << 20))
    store.put(key(0), arrays)
    store.close()
    again = MemoryStore(1 << 20, DiskTier(tmp_path, 1 << 20))
    ticket = again.submit([key(0), key(1)], Policy.SPARSE, 1, REQUEST)
    assert ticket.loading == 1
    fetched = fetch(again, [key(0), key(1)])
    assert fetched.loaded.tolist() == fetched.present.tolist() == [True, False]
    [found] = again.read([key(0)])
    assert [a.dtype for a in found] == [np.dtype(dtype)] * 2
    assert all(a.tobytes() == b.tobytes() and a.shape == b.shape for a, b in zip(arrays, found, strict=True))
    again.close()


def test_what_memory_evicted_is_loaded_again(tmp_path):
    store = filled(capacity=2, disk=DiskTier(tmp_path, 1 << 20), numbers=())
    for n in range(6):
        assert store.put(key(n), [content(n)])
        store.flush()
    assert fetch(store, [key(0), key(1)]).loaded.tolist() == [True, True]
    assert [int(arrays[0][0]) for arrays in store.read([key(0), key(1)])] == [0, 1]
    # Both places are locked now: the third exists, and has no room.
    fetched = fetch(store, [key(2)])
    assert (fetched.loaded.tolist(), fetched.present.tolist()) == ([False], [True])
    store.close()


def test_two_prefetches_of_one_object_each_lock_it(tmp_path):
    filled(disk=DiskTier(tmp_path, 1 << 20)).close()
    store = MemoryStore(1 << 20, DiskTier(tmp_path, 1 << 20))
    tickets = [store.submit([key(0)], Policy.SPARSE, locks, REQUEST) for locks in (1, 3)]
    for ticket in tickets:
        while store.poll(ticket) is None:
            time.sleep(0.001)
    assert store.read_locks == 4
    store.close()


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


def flip(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def foreign(path):
    from safetensors.numpy import save_file

    save_file({"0": np.zeros(64, np.uint8)}, path)


def empty(path):
    path.write_bytes(b"")


def swapped(path):
    others = [other for other in path.parent.glob("*.safetensors") if other != path]
    path.write_bytes(others[0].read_bytes())


@pytest.mark.parametrize("damage", [truncate, flip, foreign, empty, swapped])
def test_a_damaged_file_is_a_miss_and_is_set_aside(tmp_path, damage):
    filled(disk=DiskTier(tmp_path, 1 << 20)).close()
    path = tmp_path / DiskTier.name(key(2).identity())
    damage(path)
    tier = DiskTier(tmp_path, 1 << 20)
    store = MemoryStore(1 << 20, tier)
    fetched = fetch(store, [key(1), key(2), key(3)])
    assert fetched.loaded.tolist() == fetched.present.tolist() == [True, False, True]
    assert not path.exists()
    assert path.with_suffix(".bad").exists()
    assert store.stats()["disk_set_aside"] == 1
    # It is written anew.
    assert store.put(key(2), [content(2)])
    store.close()
    assert len(DiskTier(tmp_path, 1 << 20)) == 4


def test_a_file_that_vanished_is_a_miss(tmp_path):
    filled(disk=DiskTier(tmp_path, 1 << 20)).close()
    store = MemoryStore(1 << 20, DiskTier(tmp_path, 1 << 20))
    (tmp_path / DiskTier.name(key(2).identity())).unlink()
    assert fetch(store, [key(2)]).present.tolist() == [False]
    store.close()


def test_a_full_disk_loses_nothing_that_is_in_memory(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, 1 << 20)
    real = os.fsync

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_module.os, "fsync", full)
    store = filled(disk=tier)
    store.flush()
    assert list(tmp_path.iterdir()) == []
    assert store.stats()["disk_failed_writes"] == 4
    assert fetch(store, [key(n) for n in range(4)]).loaded.all()
    monkeypatch.setattr(disk_module.os, "fsync", real)
    store.put(key(5), [content(5)])
    store.flush()
    assert len(tier) == 1
    store.close()


def test_the_disk_keeps_to_its_bytes_and_drops_the_longest_unused(tmp_path):
    tier = DiskTier(tmp_path, 1 << 20)
    tier.write(key(0).identity(), [content(0)])
    size = tier.nbytes
    small = DiskTier(tmp_path, 3 * size)
    for n in range(1, 3):
        small.write(key(n).identity(), [content(n)])
    assert small.read(key(0).identity()) is not None
    small.write(key(3).identity(), [content(3)])
    assert [key(n).identity() in small for n in range(4)] == [True, False, True, True]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == small.nbytes <= 3 * size
    assert not small.write(key(9).identity(), [content(9, 10000)])
    # Opened with less room, it shrinks, and forgets what went unused for longest over the restart too.
    smaller = DiskTier(tmp_path, 2 * size)
    assert [key(n).identity() in smaller for n in range(4)] == [True, False, False, True]


def test_different_keys_have_different_files():
    names = {DiskTier.name(ObjectKey(*parts).identity()) for parts in [(b"a", b"1:b", 0), (b"a1:", b"b", 0)]}
    assert len(names) == 2


def test_a_process_killed_while_it_writes_leaves_whole_files_only(tmp_path):
    program = textwrap.dedent("""
        import sys
        import numpy as np
        from kvsplice.embedded.disk import DiskTier
        tier = DiskTier(sys.argv[1], 1 << 30)
        for n in range(100000):
            tier.write(b"%d" % n, [np.full(100000, n, np.float32)])
            print(n, flush=True)
    """)
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        written = [int(process.stdout.readline()) for _ in range(5)]
        process.send_signal(signal.SIGKILL)
        written += [int(line) for line in process.stdout.read().split()]
    (tmp_path / ".torn.tmp").write_bytes(b"half")
    tier = DiskTier(tmp_path, 1 << 30)
    for n in written:
        [array] = tier.read(b"%d" % n)
        assert np.array_equal(array, np.full(100000, n, np.float32))
    for n in range(len(tier)):
        assert tier.read(b"%d" % n) is not None
    assert tier.set_aside == 0
    assert list(tmp_path.glob(".*.tmp")) == []


# -- sessions ---------------------------------------------------------------------------------------------------------


def test_a_session_hashes_the_full_chunks_of_a_range():
    sessions = EmbeddedSessions(Hasher(4), 4)
    session = sessions.open("r")
    session.set_tokens(range(18))
    whole = chained_chunk_hashes(range(18), 4)
    assert len(whole) == 4
    assert list(session.hashes(0)) == list(whole)
    assert list(session.hashes(4, 12)) == list(whole[1:3])
    session.set_tokens(range(1, 19))
    assert session.hashes(0)[0] != whole[0]
    assert sessions.open("r") is session


@pytest.mark.parametrize(("start", "end", "name"), [(2, 8, "start"), (0, 9, "end"), (0, 20, "end"), (-4, 8, "start")])
def test_a_range_that_is_not_one_of_full_chunks_is_refused(start, end, name):
    session = EmbeddedSessions(Hasher(4), 4).open("r")
    session.set_tokens(range(18))
    with pytest.raises(ValueError, match=name):
        session.hashes(start, end)


def test_listeners_hear_of_each_end():
    sessions, heard = EmbeddedSessions(Hasher(4), 4), []
    sessions.on_end(heard.append)
    sessions.open("r")
    sessions.end("r")
    sessions.end("unknown")
    assert heard == ["r", "unknown"]
    assert len(sessions) == 0


# -- events -----------------------------------------------------------------------------------------------------------


def test_the_bus_counts_and_hands_on_and_outlives_a_listener_that_raises():
    bus, heard = EventBus(), []

    def fails(*_):
        raise RuntimeError("a listener's")

    assert not bus.wants("a")
    bus.subscribe(fails)
    bus.subscribe(lambda name, request_id, fields: heard.append((name, request_id, fields)), "a")
    bus.publish("a", "r", {"n": 1})
    bus.publish("b", None, {})
    assert heard == [("a", "r", {"n": 1})]
    assert bus.counts() == {"a": 1, "b": 1}
    assert bus.wants("a")


def test_events_are_lines_of_json(tmp_path):
    sink = JsonLines(tmp_path / "events.jsonl")
    sink("a", "r", {"hash": b"\x01\xff", "n": 3})
    sink("b", None, {})
    sink.close()
    first, second = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (first["event"], first["request_id"], first["hash"], first["n"]) == ("a", "r", "01ff", 3)
    assert second["event"] == "b"
    assert abs(first["time"] - time.time()) < 60


# -- paged cache ------------------------------------------------------------------------------------------------------


def test_blocks_are_given_to_one_owner_and_come_back():
    cache = PagedCache(1, 8, block_size=2, heads=1, head_size=4)
    first, second = cache.allocator.allocate(5), cache.allocator.allocate(3)
    assert sorted([*first, *second]) == list(range(8))
    with pytest.raises(ValueError, match="0 are free"):
        cache.allocator.allocate(1)
    cache.allocator.free(first)
    assert sorted(cache.allocator.allocate(5)) == sorted(first)
    for wrong in ([99], [first[0], first[0]]):
        with pytest.raises(ValueError, match="blocks"):
            cache.allocator.free(wrong)
    assert len(cache.allocator) == 0
