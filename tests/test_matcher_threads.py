"""The matcher under several Python threads."""

import threading

import numpy as np

from kvsplice import Matcher

CHUNK = 16


def text(number):
    """A chunk that has nothing in common with any other number's."""
    return np.arange(number * CHUNK, (number + 1) * CHUNK, dtype=np.uint32)


def run(*workers):
    """Run the workers at once; the first exception of any is raised here."""
    failures = []

    def guarded(worker):
        try:
            worker()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_what_was_registered_is_found_while_others_register_and_remove():
    matcher = Matcher(chunk_size=CHUNK)
    kept = range(200)
    for number in kept:
        matcher.register(text(number), [number.to_bytes(8, "little")])
    done = threading.Event()

    def read():
        found = 0
        while not done.is_set() or not found:
            for number in kept:
                query = np.concatenate([[7], text(number), [8]]).astype(np.uint32)
                [match] = matcher.match(query)
                assert match == (0, CHUNK, 1, CHUNK + 1, number.to_bytes(8, "little"))
                found += 1

    def write(first):
        for number in range(first, first + 4000):
            keys = [number.to_bytes(8, "little")]
            assert matcher.register(text(number), keys) == 1
            if number % 2:
                assert matcher.remove(keys) == 1
        done.set()

    run(read, read, lambda: write(1000), lambda: write(100_000))
    assert len(matcher) == 200 + 4000
    assert matcher._index.check() is None


def test_one_chunk_hash_is_registered_once_however_many_try():
    matcher = Matcher(chunk_size=CHUNK)
    counts = []

    def write():
        counts.append(sum(matcher.register(text(n), [n.to_bytes(8, "little")]) for n in range(2000)))

    run(write, write, write)
    assert sum(counts) == len(matcher) == 2000
    assert matcher.stats().contents == 2000


def test_overlapping_registrations_in_flight_are_counted():
    matcher = Matcher(chunk_size=CHUNK)
    key = [b"key"]
    matcher.register(text(0), key)
    matcher.begin(key)
    matcher.begin(key)
    matcher.finish(key)
    assert matcher.strike(key, threshold=1) == []
    matcher.finish(key)
    assert matcher.strike(key, threshold=1) == key


def test_memory_stays_flat_under_churn():
    matcher = Matcher(chunk_size=CHUNK, capacity=2000)
    sizes = []
    for number in range(200_000):
        matcher.register(text(number), [number.to_bytes(8, "little")])
        if number % 50_000 == 49_999:
            stats = matcher.stats()
            sizes.append(stats.token_bytes + stats.overhead_bytes)
    assert max(sizes) <= 1.1 * sizes[0]
    assert len(matcher) == 2000
