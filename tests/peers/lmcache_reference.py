"""LMCache's matcher, as it is or with smaller constants, and where it errs by design."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from lmcache.v1.multiprocess.modules.blend.matcher import BlendTokenRangeMatcher

from kvsplice.hashing import chunk_fingerprints

DEFAULT_BITS = BlendTokenRangeMatcher._TABLE_BITS


def reference(chunk_size=256, dedup_content=False, *, base=None, table_bits=DEFAULT_BITS):
    """LMCache's matcher with another base of the fingerprints, or with a smaller table that also allots fewer ids."""
    constants = {"_TABLE_BITS": table_bits, "_TABLE_SIZE": 1 << table_bits}
    if base is not None:
        constants["_BASE"] = np.uint64(base)
    return type("Reference", (BlendTokenRangeMatcher,), constants)(chunk_size, dedup_content)


def slot_of(matcher, text):
    """The one slot of the reference's table where a text can stand."""
    [fingerprint] = chunk_fingerprints(np.asarray(text), matcher.chunk_size, int(matcher._BASE)).tolist()
    return fingerprint & int(matcher._mask)


def rows(results):
    """Results of either matcher as tuples."""
    return [(r.old_st, r.old_ed, r.cur_st, r.cur_ed, r.hash) for r in results]


@dataclass
class Slots:
    """Which chunk hash each slot of the reference leads to, as its design has it.

    That is the last one registered, until any chunk hash of that slot is removed. Kept from the operations alone,
    without a look into the reference.
    """

    matcher: BlendTokenRangeMatcher
    owner: dict[int, bytes | None] = field(default_factory=dict)
    slot: dict[bytes, int] = field(default_factory=dict)

    def registered(self, chunk_hash, text):
        self.slot[chunk_hash] = slot_of(self.matcher, text)
        self.owner[self.slot[chunk_hash]] = chunk_hash

    def removed(self, chunk_hash):
        if chunk_hash in self.slot:
            self.owner[self.slot.pop(chunk_hash)] = None

    def found(self, text):
        """The chunk hash that a probe for the text comes to, if any. It may be that of another text."""
        return self.owner.get(slot_of(self.matcher, text))
