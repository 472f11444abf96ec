"""Results are LMCache's own, and so can go where LMCache's results go."""

import dataclasses

from lmcache.v1.multiprocess.custom_types import (
    CBMatchResult,
    CBUnifiedLookupResult,
    get_customized_decoder,
    get_customized_encoder,
)

from kvsplice.lmcache import TokenRangeMatcher
from kvsplice.lmcache import matcher as adapter_module

A, KEYS = [1, 2, 3, 4], [b"aaaaaaaa"]


def test_results_are_of_the_type_of_lmcache():
    matcher = TokenRangeMatcher(4)
    matcher.on_new_token_hashes(A, KEYS, position_offset=8)
    [result] = matcher.match_sub_sequence([0, *A])
    assert type(result) is CBMatchResult
    assert result == CBMatchResult(old_st=8, old_ed=12, cur_st=1, cur_ed=5, hash=KEYS[0])
    sent = get_customized_encoder(CBUnifiedLookupResult).encode(CBUnifiedLookupResult(0, [result]))
    assert get_customized_decoder(CBUnifiedLookupResult).decode(sent).non_prefix_segments == [result]


def test_our_stand_in_is_like_it():
    ours, theirs = adapter_module.CBMatchResult, CBMatchResult
    fields = [[(field.name, field.default) for field in dataclasses.fields(kind)] for kind in (ours, theirs)]
    assert fields[0] == fields[1]
    values = (0, 4, 1, 5, b"k")
    assert repr(ours(*values)) == repr(theirs(*values))
    assert repr(ours.__dataclass_params__) == repr(theirs.__dataclass_params__)
    assert ours.__hash__ is theirs.__hash__ is None
