"""The server module's factory, on stand-ins; tests/peers/test_server_matcher.py has a real server."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from kvsplice.lmcache import TokenRangeMatcher, build_server_modules


class Theirs:
    """LMCache's matcher, as far as the factory looks at it."""

    def __init__(self, chunk_size=16, dedup=False):
        self.chunk_size = chunk_size
        self._dedup_content = dedup

    on_new_token_hashes = match_sub_sequence = remove_chunks = None


@pytest.fixture(autouse=True)
def lmcache(monkeypatch):
    module = ModuleType("lmcache")
    module.__version__ = "0.5.6"
    monkeypatch.setitem(sys.modules, "lmcache", module)
    return module


def build(config, modules=None, chunk_size=16, **blend):
    modules = (
        [SimpleNamespace(), SimpleNamespace(_token_range_matcher=Theirs(), **blend)] if modules is None else modules
    )
    return SimpleNamespace(
        config=config, modules=tuple(modules), mp_config=SimpleNamespace(chunk_size=chunk_size), server_context=object()
    )


def test_our_matcher_takes_the_place_of_theirs():
    context = build({"mode": "matcher", "capacity": 100, "on_full": "reject", "seed": 3})
    module = build_server_modules(context)
    ours = context.modules[1]._token_range_matcher
    assert isinstance(ours, TokenRangeMatcher)
    assert (ours.chunk_size, ours.dedup_content, ours.matcher.capacity) == (16, False, 100)
    assert module.context is context.server_context
    ours.on_new_token_hashes(list(range(32)), [b"a", b"b"])
    assert module.report_status()["kvsplice"]["matcher"]["entries"] == 2
    assert module.close() is None


def test_it_deduplicates_where_theirs_did():
    context = build({"mode": "matcher"}, [SimpleNamespace(_token_range_matcher=Theirs(dedup=True))])
    build_server_modules(context)
    assert context.modules[0]._token_range_matcher.dedup_content


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "config: mode is ''; it has to be 'matcher' or 'module'"),
        ({"mode": "blend"}, "config: mode is 'blend'; it has to be 'matcher' or 'module'"),
        ({"mode": "matcher", "capacty": 5}, "config: unknown key 'capacty'; there are mode, capacity, on_full, seed"),
        ({"mode": "matcher", "capacity": 0}, "config: capacity is 0, no number"),
        ({"mode": "matcher", "capacity": True}, "config: capacity is True, no number"),
        ({"mode": "matcher", "capacity": "5"}, "config: capacity is '5', no number"),
        ({"mode": "matcher", "on_full": "wait"}, "config: on_full is 'wait', none of evict, reject"),
        ({"mode": "matcher", "seed": -1}, "config: seed is -1"),
        ({"mode": "matcher", "seed": 0.5}, "config: seed is 0.5"),
    ],
)
def test_a_wrong_configuration_changes_nothing(config, message):
    context = build(config)
    with pytest.raises(ValueError, match="config") as error:
        build_server_modules(context)
    assert message in str(error.value)
    assert isinstance(context.modules[1]._token_range_matcher, Theirs)


def test_a_server_without_a_blend_module():
    with pytest.raises(RuntimeError, match="start it with --engine-type blend"):
        build_server_modules(build({"mode": "matcher"}, [SimpleNamespace()]))


def test_a_matcher_that_is_not_known():
    context = build({"mode": "matcher"}, [SimpleNamespace(_token_range_matcher=SimpleNamespace(chunk_size=16))])
    with pytest.raises(
        RuntimeError, match=r"no on_new_token_hashes, match_sub_sequence, remove_chunks.*tested with 0.5.6"
    ):
        build_server_modules(context)


def test_two_chunk_sizes():
    with pytest.raises(RuntimeError, match="chunks of 16 tokens"):
        build_server_modules(build({"mode": "matcher"}, chunk_size=32))


def test_a_later_lmcache_is_tried_and_named(lmcache, caplog):
    lmcache.__version__ = "0.6.0"
    build_server_modules(build({"mode": "matcher"}))
    assert "tested with lmcache 0.5.6, not 0.6.0" in caplog.text


def test_with_a_coordinator_the_log_says_that_nobody_asks(caplog):
    build_server_modules(build({"mode": "matcher"}, _coordinator=object()))
    assert "with a coordinator" in caplog.text
