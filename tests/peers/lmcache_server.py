"""A running ``lmcache server``, and a worker's side of it, made of LMCache's own classes."""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
import zmq
from lmcache.utils import EngineType
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from lmcache.v1.multiprocess.transfer_context import create_transfer_context
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
from lmcache.v1.platform import resolve_kv_wrapper_factory
from lmcache.v1.platform.base.event_ipc import get_event_ipc_backend

CHUNK = 16
TIMEOUT = 30


@dataclass(frozen=True)
class Geometry:
    """The server's chunks, and a worker's paged cache.

    ``form`` is one of `FORMS`. Each of the ``tables`` groups of layers has a block table, a rope, and a number of heads
    of its own.
    """

    chunk: int = CHUNK
    block: int = 4
    layers: int = 2
    blocks: int = 128
    heads: int = 2
    size: int = 8
    positions: int = 1024
    form: str = "NHD"
    tables: int = 1
    fp8: bool = False


LATENT = 24
"""Elements in front of the rotated ones, in the form ``MLA``."""

FORMS = {
    "NHD": (lambda g, heads: (2, g.blocks, g.block, heads, g.size), lambda kv: kv.flatten(1, 2)),
    "HND": (lambda g, heads: (2, g.blocks, heads, g.block, g.size), lambda kv: kv.transpose(2, 3).flatten(1, 2)),
    "blocks first": (
        lambda g, heads: (g.blocks, 2, g.block, heads, g.size),
        lambda kv: kv.transpose(0, 1).flatten(1, 2),
    ),
    "fused": (
        lambda g, heads: (g.blocks, g.block, heads, 2 * g.size),
        lambda kv: torch.stack(kv.flatten(0, 1).chunk(2, dim=-1)),
    ),
    "MLA": (lambda g, heads: (g.blocks, g.block, LATENT + g.size), lambda kv: kv.flatten(0, 1)[None, :, None]),
}
"""Shape of a layer's tensor, and how to see it as ``[planes, slots, heads, elements]``, K first."""


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Server:
    """LMCache's server in a process of its own. ``config`` is kvsplice's; without one the server is as it comes."""

    def __init__(
        self,
        folder,
        config=None,
        *arguments,
        engine_type="blend",
        geometry=Geometry(),
        gigabytes="1",
        transport="zmq",
    ):
        self.log = Path(folder) / "server.log"
        self.geometry = geometry
        self._transport = transport
        self._port, self._http = free_ports(2)
        command = [
            str(Path(sys.executable).with_name("lmcache")), "server",
            "--host", "127.0.0.1", "--port", str(self._port),
            "--http-host", "127.0.0.1", "--http-port", str(self._http),
            "--engine-type", engine_type, "--supported-transfer-mode", "lmcache_driven", "--eviction-policy", "LRU",
            "--l1-size-gb", gigabytes, "--l1-init-size-gb", gigabytes, "--chunk-size", str(geometry.chunk),
            "--transport", transport, *arguments,
        ]  # fmt: skip
        if config is not None:
            command += ["--server-module", json.dumps({"module_path": "kvsplice.lmcache", "config": config})]
        environment = os.environ | {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
        self._clients = []

    @property
    def url(self):
        return f"{'grpc' if self._transport == 'grpc' else 'tcp'}://127.0.0.1:{self._port}"

    def wait_until_up(self):
        deadline = time.monotonic() + 90
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{self._http}/status").is_success:
                    return self
            except httpx.TransportError:
                pass
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)

    def status(self):
        return httpx.get(f"http://127.0.0.1:{self._http}/status").raise_for_status().json()

    def metrics(self):
        return httpx.get(f"http://127.0.0.1:{self._http}/metrics").raise_for_status().text

    def read_locks(self):
        """How many objects in memory are locked for reading."""
        return self.status()["storage_manager"]["l1_manager"]["read_locked_count"]

    def worker(self, instance_id=1000, model="m", seed=0):
        client = Worker(self.url, instance_id, model, seed, self.geometry)
        self._clients.append(client)
        return client

    def stop(self):
        for client in self._clients:
            client.close()
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def request_client(url):
    """LMCache's client, and what closes it."""
    context = zmq.Context()
    context.setsockopt(zmq.LINGER, 0)
    calls = RequestClientFactory.create(url, context=context)

    def close():
        calls.close()
        context.term()

    return calls, close


def lookup_key(tokens, request_id, chunk=CHUNK, model="m", worker=None, salt=""):
    end = len(tokens) // chunk * chunk
    return IPCCacheServerKey(model, 1, worker, tuple(tokens), 0, end, request_id, cache_salt=salt, num_kv_readers=1)


class Worker:
    """One worker of an inference engine: a paged cache in shared memory, with random KV in it."""

    def __init__(self, url, instance_id, model, seed, geometry):
        self.calls, self._disconnect = request_client(url)
        self.instance_id, self.model, self._of = instance_id, model, geometry
        assert self.calls.get_chunk_size().result(TIMEOUT) == geometry.chunk
        shape, self._view = FORMS[geometry.form]
        self._group = [index * geometry.tables // geometry.layers for index in range(geometry.layers)]
        shapes = [shape(geometry, geometry.heads * (group + 1)) for group in self._group]
        dtype = torch.uint8 if geometry.fp8 else torch.float32
        self.kv = {f"layer.{index}": torch.zeros(each, dtype=dtype) for index, each in enumerate(shapes)}
        self._transfer = create_transfer_context(
            self.kv, mode="lmcache_driven", instance_id=instance_id, req_client=self.calls
        )
        layers = range(geometry.layers)
        self._transfer.register(
            self.kv,
            model,
            1,
            geometry.chunk // geometry.block,
            TIMEOUT,
            layout_hints={"kv_layout": "HND" if geometry.form == "HND" else "NHD"},
            engine_group_infos=[
                EngineGroupInfo(group, tuple(i for i in layers if self._group[i] == group), geometry.block)
                for group in range(geometry.tables)
            ],
            engine_type=EngineType.VLLM,
        )
        # Now that it is shared: before, what was in it would have been lost.
        generator = torch.Generator().manual_seed(seed)
        for layer in self.kv.values():
            values = torch.randn(layer.shape, generator=generator)
            layer.copy_(values.to(torch.float8_e4m3fn).view(torch.uint8) if geometry.fp8 else values)
        half = geometry.size // 2
        self.ropes = []
        for group in range(geometry.tables):
            angles = torch.arange(geometry.positions)[:, None] * (100.0 * (group + 1)) ** -(torch.arange(half) / half)
            self.ropes.append(torch.cat([angles.cos(), angles.sin()], dim=1))
        self.register_rope()

    def register_rope(self):
        wrap = resolve_kv_wrapper_factory("cpu")
        windows = [[LATENT, self._of.size]] if self._of.form == "MLA" else []
        return self.calls.cb_register_rope(
            self.instance_id, [wrap(rope) for rope in self.ropes], self._of.size, True, list(range(self._of.tables)),
            windows, [], "fp8_e4m3" if self._of.fp8 else "",
        ).result(TIMEOUT)  # fmt: skip

    def key(self, tokens, request_id, worker=None, salt=""):
        return lookup_key(tokens, request_id, self._of.chunk, self.model, worker, salt)

    def _block_tables(self, blocks):
        """A table per group of layers; each stands elsewhere."""
        return [[block + 3 * group for block in blocks] for group in range(self._of.tables)]

    def store(self, tokens, request_id="s", salt=""):
        """Store what lies in the first blocks as the KV of these tokens."""
        tables = self._block_tables(range(-(-len(tokens) // self._of.block)))
        event = self._transfer.create_recorded_event()
        key = self.key(tokens, request_id, 0, salt)
        per_chunk = self._of.chunk // self._of.block
        return self._transfer.submit_store(request_id, key, self.kv, tables, event, per_chunk).result(TIMEOUT)

    def look_up(self, tokens, request_id, salt=""):
        deadline = time.monotonic() + TIMEOUT
        while True:
            result = self.calls.cb_unified_lookup(self.key(tokens, request_id, salt=salt), 1).result(TIMEOUT)
            if result is not None:
                return result
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def retrieve(self, tokens, request_id, matches, blocks, salt=""):
        """Have matches written into blocks; whether the server says that it was done."""
        backend = get_event_ipc_backend("cpu")
        event = backend.create_event("cpu")
        backend.record_event(event, None)
        key = self.key(tokens, request_id, 0, salt)
        handle = backend.export_event(event, "cpu")
        tables = self._block_tables(blocks)
        return self.calls.cb_retrieve_pre_computed(key, matches, tables, self.instance_id, handle).result(TIMEOUT)[1]

    def contents(self):
        """All of the paged cache, a layer each: ``[planes, slots, heads, elements]``, K first."""
        return [self._view(layer).clone() for layer in self.kv.values()]

    def assert_spliced(self, before, matches, blocks, now=None):
        """Against the contents of before: blocks hold the matches, moved, and nothing else has changed."""
        contents = self.contents() if now is None else now
        size, chunk = self._of.block, self._of.chunk
        for layer, (was, found) in enumerate(zip(before, contents, strict=True)):
            group = self._group[layer]
            (stored,) = self._block_tables(range(self._of.blocks))[group : group + 1]
            (target,) = self._block_tables(blocks)[group : group + 1]
            expected, moved = self._numbers(was), torch.zeros(was.shape[1], dtype=torch.bool)
            for match in matches:
                old, new = (
                    [table[at // size] * size + at % size for at in range(start, start + chunk)]
                    for table, start in ((stored, match.old_st), (target, match.cur_st))
                )
                expected[:, new] = self._numbers(was[:, old])
                keys = expected[0, new]
                keys[..., -self._of.size :] = _moved(
                    keys[..., -self._of.size :], self.ropes[group].double(), match.old_st, match.cur_st
                )
                expected[0, new], moved[new] = keys, True
            # A float8_e4m3fn has 3 bits behind its first, and the least step is 2**-9.
            bound = {"rtol": 2**-3, "atol": 2**-9} if self._of.fp8 else {"rtol": 0, "atol": 2e-5}
            turned = slice(expected.shape[-1] - self._of.size, None)
            torch.testing.assert_close(
                self._numbers(found)[0, moved][..., turned], expected[0, moved][..., turned],
                msg=lambda text, layer=layer: f"K of layer {layer}: {text}", **bound,
            )  # fmt: skip
            expected[0, moved, :, turned] = self._numbers(found)[0, moved][..., turned]
            assert torch.equal(self._numbers(found), expected), f"layer {layer}: V, a latent, or what was not matched"

    def _numbers(self, bits):
        return (bits.view(torch.float8_e4m3fn) if self._of.fp8 else bits).double()

    def end(self, request_id):
        self.calls.end_session(request_id).result(TIMEOUT)

    def free_prefix(self, tokens, request_id):
        self.calls.free_lookup_locks(self.key(tokens, request_id), 1).result(TIMEOUT)

    def forget_everything(self):
        self.calls.clear(True).result(TIMEOUT)

    def close(self):
        self._transfer.close()
        self._disconnect()


def _moved(keys, table, old, new):
    """Keys ``[tokens, heads, elements]`` from one position to another, by the rows of NeoX's table."""
    half = table.shape[1] // 2

    def row(start):
        rows = table[start : start + len(keys), None]
        return torch.complex(rows[..., :half], rows[..., half:])

    pairs = torch.complex(keys[..., :half], keys[..., half:]) * row(new) / row(old)
    return torch.cat([pairs.real, pairs.imag], dim=-1)
