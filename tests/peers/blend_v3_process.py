"""LMCache 0.5.2's blend module over parts in memory, in a process of its own: a scenario per line in, its outcome out.

Only storage, paged cache, stream and events are ours; hashing, matching, lookup, retrieve and the operations that move
and turn KV are LMCache's. With the argument ``kvsplice`` our matcher takes the place of LMCache's, as the launcher has
it. Run with that version first on the path; `test_engine_lmcache` and `test_launcher_lmcache` do.
"""

import json
import sys
import warnings
from collections import Counter
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lmcache
    import lmcache.v1.multiprocess.modules.blend_v3 as module
    import torch
    from lmcache.native_storage_ops import Bitmap
    from lmcache.v1.distributed.api import MemoryLayoutDesc, TrimPolicy
    from lmcache.v1.mp_observability.event import EventType
    from lmcache.v1.multiprocess.custom_types import CBMatchResult, IPCCacheServerKey
    from lmcache.v1.multiprocess.engine_context import LayoutDescRegistry
    from lmcache.v1.multiprocess.session import SessionManager
    from lmcache.v1.multiprocess.token_hasher import TokenHasher

from engine_parts import BLOCK, CHUNK, HEADS, SIZE, planted_object, rope_table
from kvsplice.lmcache.launcher import replace_matcher
from kvsplice.lmcache.settings import Settings

LAYERS, BLOCKS, MODEL = 2, 64, "m"


class Event:
    """Stands for a CUDA event; the handle is handed back as it came."""

    def __init__(self, interprocess=False):
        pass

    @staticmethod
    def from_ipc_handle(device, handle):
        return Event()

    def wait(self, stream=None):
        pass

    def record(self):
        pass

    def ipc_handle(self):
        return b"done"


class Device:
    Event = Event

    def device(self, device):
        return nullcontext()

    def stream(self, stream):
        return nullcontext()


class Storage:
    """Objects in a dict; a prefetch answers after as many ticks as `latency` said when it was submitted."""

    def __init__(self):
        self.objects, self.locks, self.latency, self.waiting = {}, Counter(), 0, []

    def submit_prefetch_task(self, keys, layout, extra_count=0, external_request_id="", policy=TrimPolicy.PREFIX):
        loading = list(range(len(keys))) if self.latency else []
        handle = SimpleNamespace(
            keys=list(keys), policy=policy, locks=1 + extra_count, wait=self.latency, l2_orig_indices=loading, bits=None
        )
        self.waiting.append(handle)
        self._load_what_is_due()
        return handle

    def tick(self):
        for handle in self.waiting:
            handle.wait -= 1
        self._load_what_is_due()

    def _load_what_is_due(self):
        for handle in [each for each in self.waiting if each.wait <= 0]:
            self.waiting.remove(handle)
            held = [key in self.objects for key in handle.keys]
            if handle.policy is TrimPolicy.PREFIX and False in held:
                first = held.index(False)
                held[first:] = [False] * (len(held) - first)
            handle.bits = Bitmap(len(held))
            for index, each in enumerate(held):
                if each:
                    handle.bits.set(index)
                    self.locks[handle.keys[index]] += handle.locks

    def query_prefetch_status(self, handle):
        return handle.bits

    def finish_read_prefetched(self, keys, extra_count=0):
        for key in keys:
            self.locks[key] -= 1 + extra_count

    @contextmanager
    def read_prefetched_results(self, keys):
        yield None if any(key not in self.objects for key in keys) else [self.objects[key] for key in keys]
        self.finish_read_prefetched(keys)


class Bus:
    def __init__(self):
        self.events = []

    def publish(self, event):
        self.events.append((event.event_type.value, event.session_id, dict(event.metadata or {})))

    def publish_on_stream(self, stream, event):
        self.publish(event)

    def has_subscribers(self, event_type):
        return True


class Cache:
    """One rank's paged cache, ``[blocks, 2, block_size, hidden]`` for each layer."""

    device = torch.device("cpu")
    stream = cupy_stream = None
    max_batch_size = 4

    def __init__(self):
        hidden = HEADS * SIZE
        self.layers = [torch.zeros(BLOCKS, 2, BLOCK, hidden) for _ in range(LAYERS)]
        self._slots = torch.zeros(self.max_batch_size, 2, LAYERS, CHUNK, hidden)
        self._format = module.lmc_ops.EngineKVFormat.NL_X_NB_TWO_BS_NH_HS
        group = SimpleNamespace(
            tokens_per_block=BLOCK,
            slots_per_block=BLOCK,
            engine_group_idx=0,
            engine_kv_format=self._format,
            shape_desc=SimpleNamespace(nb=BLOCKS),
        )
        self.kv_layer_groups_manager = SimpleNamespace(kernel_groups=[group], num_kernel_groups=1)

    def stage_block_ids(self, tables):
        return [torch.tensor(table, dtype=torch.long) for table in tables]

    def get_temp_object_group_buffer(self, slot, group):
        return self._slots[slot]

    def get_temp_kernel_group_buffer(self, slot, group):
        return self._slots[slot]

    def get_kernel_group_kv_pointers(self, group):
        return self.layers

    def get_engine_kv_format(self, group):
        return self._format


class Server:
    def __init__(self, world_size, segmented):
        self.world_size = world_size
        self.storage, self.bus = Storage(), Bus()
        hasher = TokenHasher(CHUNK)
        self.sessions = SessionManager(hasher, cleanup_interval=None)
        layouts = LayoutDescRegistry()
        layouts.register(MODEL, world_size, MemoryLayoutDesc([torch.Size([2, LAYERS, CHUNK, SIZE])], [torch.float32]))
        self.caches = [Cache() for _ in range(world_size)]
        transfer = SimpleNamespace(store=self._copy, get_and_touch_context_entry=self._entry)
        context = SimpleNamespace(
            chunk_size=CHUNK,
            event_bus=self.bus,
            session_manager=self.sessions,
            token_hasher=hasher,
            layout_desc_registry=layouts,
            storage_manager=self.storage,
        )
        self.blend = module.BlendV3Module(context, transfer, enable_segmented_prefix=segmented)
        rope = SimpleNamespace(to_tensor=lambda: torch.from_numpy(rope_table()))
        for rank in range(world_size):
            self.blend.cb_register_rope(rank, [rope], SIZE, True, [])

    def _entry(self, instance):
        return SimpleNamespace(cache_context=self.caches[instance], model_name=MODEL, world_size=self.world_size)

    def _keys(self, key, chunk_hash):
        return module.ipc_key_to_object_keys(key, [chunk_hash], [0])[0]

    def _copy(self, key, instance, block_ids, event):
        session = self.sessions.get_or_create(key.request_id)
        session.set_tokens(list(key.token_ids))
        for each in session.get_hashes(key.start, key.end):
            chunk_hash = TokenHasher.hash_to_bytes(each)
            [object_key] = self._keys(key, chunk_hash)
            self.storage.objects[object_key] = torch.from_numpy(planted_object(chunk_hash, instance, LAYERS))
        return event, True

    def _key(self, op, rank=None):
        tokens = op["tokens"]
        end = len(tokens) // CHUNK * CHUNK
        return IPCCacheServerKey(MODEL, self.world_size, rank, tuple(tokens), 0, end, op["id"])

    # -- what a scenario asks for

    def store(self, op):
        for rank in range(self.world_size):
            self.blend.store(self._key(op, rank), rank, [[]], b"")
        # The work of the background thread, done at once.
        self.blend._drain_fingerprints_sync()
        self.blend._pending_fp_hashes.clear()

    def lose(self, op):
        chunk_hash = bytes.fromhex(op["hash"])
        for object_key in [key for key in self.storage.objects if key.chunk_hash == chunk_hash]:
            ranks = sorted({key.kv_rank for key in self.storage.objects if key.chunk_hash == chunk_hash})
            if ranks.index(object_key.kv_rank) == op["rank"] % len(ranks):
                del self.storage.objects[object_key]
                return

    def lookup(self, op):
        self.storage.latency = op["latency"]
        key = self._key(op)
        polls = 0
        while (result := self.blend.cb_unified_lookup(key, op["tp_size"])) is None:
            polls += 1
            self.storage.tick()
        spans = (result.non_prefix_segments, result.segmented_prefix_segments)
        return {
            "polls": polls,
            "prefix": result.prefix_coverage_tokens,
            "matches": [[rows(each) for each in span] for span in spans],
        }

    def retrieve(self, op):
        rank = op["rank"]
        matches = [CBMatchResult(*row[:4], bytes.fromhex(row[4])) for row in op["matches"]]
        _, ran = self.blend.cb_retrieve_pre_computed(self._key(op, rank), matches, [op["blocks"]], rank, b"")
        layers = [layer.numpy().tobytes().hex() for layer in self.caches[rank].layers]
        return {"ran": ran, "cache": layers}


def rows(match):
    return [match.old_st, match.old_ed, match.cur_st, match.cur_ed, match.hash.hex()]


def plain(value):
    return value.hex() if isinstance(value, bytes) else [plain(each) for each in value] if _is_list(value) else value


def _is_list(value):
    return isinstance(value, (list, tuple))


def run(scenario):
    server = Server(scenario["world_size"], scenario["segmented"])
    outcomes = [getattr(server, op["op"])(op) for op in scenario["ops"]]
    server.blend.close()
    events = [
        [name, rid, {key: plain(value) for key, value in fields.items()}] for name, rid, fields in server.bus.events
    ]
    return {"outcomes": outcomes, "events": events}


def copy_to_slot(obj, slot):
    slot.copy_(obj)


def main():
    # There is no GPU: what of CUDA the module asks for does nothing, and a copy is a copy. There is no second thread.
    module.torch_dev = Device()
    module.BlendV3Module._drain_fingerprint_queue = lambda self: None
    module.check_interprocess_event_support = lambda: None
    module.lmcache_memcpy_async_h2d = copy_to_slot
    if sys.argv[1:] == ["kvsplice"]:
        replace_matcher(Settings(mode="matcher"))
    known = sorted(each.value for each in EventType)
    print(json.dumps({"version": lmcache.__version__, "events": known}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    np.seterr(all="raise")
    main()
