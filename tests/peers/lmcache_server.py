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
    """The server's chunks, and a worker's paged cache."""

    chunk: int = CHUNK
    block: int = 4
    layers: int = 2
    blocks: int = 128
    heads: int = 2
    size: int = 8
    positions: int = 1024


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
        self.blocks = geometry.blocks
        assert self.calls.get_chunk_size().result(TIMEOUT) == geometry.chunk
        shape = (2, geometry.blocks, geometry.block, geometry.heads, geometry.size)
        self.kv = {f"layer.{index}": torch.zeros(shape) for index in range(geometry.layers)}
        self._transfer = create_transfer_context(
            self.kv, mode="lmcache_driven", instance_id=instance_id, req_client=self.calls
        )
        self._transfer.register(
            self.kv,
            model,
            1,
            geometry.chunk // geometry.block,
            TIMEOUT,
            layout_hints={"kv_layout": "NHD"},
            engine_group_infos=[EngineGroupInfo(0, tuple(range(geometry.layers)), geometry.block)],
            engine_type=EngineType.VLLM,
        )
        # Now that it is shared: before, what was in it would have been lost.
        generator = torch.Generator().manual_seed(seed)
        for layer in self.kv.values():
            layer.copy_(torch.randn(shape, generator=generator))
        half = geometry.size // 2
        angles = torch.arange(geometry.positions)[:, None] * 100.0 ** -(torch.arange(half) / half)
        self.rope = torch.cat([angles.cos(), angles.sin()], dim=1)
        wrap = resolve_kv_wrapper_factory("cpu")
        self.calls.cb_register_rope(instance_id, [wrap(self.rope)], geometry.size, True, [], [], [], "").result(TIMEOUT)

    def key(self, tokens, request_id, worker=None, salt=""):
        return lookup_key(tokens, request_id, self._of.chunk, self.model, worker, salt)

    def store(self, tokens, request_id="s", salt=""):
        blocks = list(range(-(-len(tokens) // self._of.block)))
        event = self._transfer.create_recorded_event()
        key = self.key(tokens, request_id, 0, salt)
        per_chunk = self._of.chunk // self._of.block
        return self._transfer.submit_store(request_id, key, self.kv, [blocks], event, per_chunk).result(TIMEOUT)

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
        call = self.calls.cb_retrieve_pre_computed(key, matches, [blocks], self.instance_id, handle)
        return call.result(TIMEOUT)[1]

    def tokens_in(self, blocks):
        """What lies in blocks, a layer each: ``[2, tokens, heads, size]``."""
        return [layer[:, blocks].flatten(1, 2).clone() for layer in self.kv.values()]

    def end(self, request_id):
        self.calls.end_session(request_id).result(TIMEOUT)

    def forget_everything(self):
        self.calls.clear(True).result(TIMEOUT)

    def close(self):
        self._transfer.close()
        self._disconnect()
