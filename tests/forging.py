"""Different texts with equal fingerprints, for a base that is known.

A fingerprint is linear in the tokens, so it is enough to find small changes at a few places that sum to 0 modulo
2**64. Eight places with 2**17 changes each leave 2**136 sums, far more than 2**64, and a tree of joins finds some in
half a second: pairs of places that cancel in the low bits, pairs of those that cancel in the next ones, and so on
(Wagner, "A generalized birthday problem", 2002).

Only for bases of our own test seeds: with a base that is drawn at random nobody can do this, which is why `Matcher`
draws one, and the tokens are compared all the same.
"""

from __future__ import annotations

import numpy as np

BITS = 17
PLACES = 8
SPREAD = 1 << BITS
"""Changed tokens differ by less than this."""


def _join(left_sums, right_sums, low_bits):
    """Index pairs of the sums that add up to 0 modulo ``2**low_bits``."""
    mask = np.uint64((1 << low_bits) - 1)
    wanted = (np.uint64(0) - left_sums) & mask
    there = right_sums & mask
    order = np.argsort(there, kind="stable")
    first = np.searchsorted(there[order], wanted, side="left")
    count = np.searchsorted(there[order], wanted, side="right") - first
    left = np.repeat(np.arange(len(wanted)), count)
    within = np.arange(len(left)) - np.repeat(np.cumsum(count) - count, count)
    return left, order[np.repeat(first, count) + within]


def zero_changes(base, chunk_size):
    """Changes of a text that leave its fingerprint as it is.

    Returns an int64 array of shape ``(n, chunk_size)``, ``n`` a dozen or so. Adding a row to the tokens of a text
    changes eight of them, each by less than `SPREAD`. Deterministic.
    """
    assert chunk_size >= PLACES
    assert base % 2
    places = np.linspace(0, chunk_size - 1, PLACES).astype(int)
    sizes = np.arange(1, SPREAD, dtype=np.uint64)
    # A node of the tree: the changes at its places, one row for each sum, and the sums.
    nodes = []
    for n, place in enumerate(places):
        signed = sizes if n % 2 else np.uint64(0) - sizes
        power = np.uint64(pow(base, int(chunk_size - 1 - place), 1 << 64))
        nodes.append((signed.view(np.int64)[:, None], signed * power))
    for low_bits in (BITS, 2 * BITS, 64):
        joined = []
        for (left, left_sums), (right, right_sums) in zip(nodes[::2], nodes[1::2], strict=True):
            i, j = _join(left_sums, right_sums, low_bits)
            joined.append((np.hstack([left[i], right[j]]), left_sums[i] + right_sums[j]))
        nodes = joined
    [(changes, sums)] = nodes
    assert not sums.any()
    rows = np.zeros((len(changes), chunk_size), dtype=np.int64)
    rows[:, places] = changes
    return rows


def forge(base, chunk_size=256, rng_seed=0):
    """Texts that all differ and all have one fingerprint: uint32, shape ``(n, chunk_size)``, ``n`` at least 2."""
    text = np.random.default_rng(rng_seed).integers(SPREAD, 2 * SPREAD, chunk_size)
    changes = zero_changes(base, chunk_size)
    assert len(changes), f"no collision found under base {base}"
    texts = np.unique(np.vstack([text[None, :], text + changes]), axis=0)
    assert len(texts) == len(changes) + 1
    return texts.astype(np.uint32)
