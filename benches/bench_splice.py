"""Splicing on a GPU: raw copies, kvsplice's three ways in, and LMCache's compiled operations, in one run.

    python benches/bench_splice.py [--lmcache FOLDER ...] [--out results.json]

FOLDER is an unpacked LMCache wheel (or a folder with its ``c_ops*.so``) whose compiled operations load on the installed
torch: 0.5.2 (rotate, concatenate, scatter) or 0.5.3 (native retrieve plan). Each runs in a process of its own, together
with the raw copies and with kvsplice, round by round. Needs torch with CUDA, CuPy and kvsplice.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import kvsplice
from kvsplice.rope_scaling import cos_sin_cache
from kvsplice.splicer import CudaOptions, StagedMemory

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS, BLOCK = 256, 16
OLD_START, CUR_START = 40017, 11


@dataclass(frozen=True)
class Shape:
    """A model's KV on one GPU. ``latent`` is the content width of MLA's rows, whose last 64 elements carry rope."""

    layers: int
    heads: int
    size: int
    latent: int = 0

    @property
    def kv_size(self) -> int:
        """Planes of a stored object."""
        return 1 if self.latent else 2

    @property
    def hidden(self) -> int:
        """Elements of a token's row."""
        return self.heads * self.size


SHAPES = {
    "Llama-3-8B": Shape(32, 8, 128),
    "Llama-3-70B, TP 8": Shape(80, 1, 128),
    "Qwen3-32B": Shape(64, 8, 128),
    "DeepSeek-V3 (MLA)": Shape(61, 1, 576, 512),
}


class Rig:
    """Chunks in pinned and in device memory, a paged cache, a rope table and a splicer, all of one shape."""

    def __init__(self, shape: Shape, count: int, options: CudaOptions | None = None) -> None:
        self.shape, self.count = shape, count
        object_shape = (shape.kv_size, shape.layers, TOKENS, shape.hidden)
        self.device_objects = torch.randn((count, *object_shape), device="cuda", dtype=torch.bfloat16)
        self.pinned_objects = torch.empty((count, *object_shape), dtype=torch.bfloat16, pin_memory=True)
        self.pinned_objects.copy_(self.device_objects)
        self.nbytes = self.device_objects.nbytes
        self.scratch = torch.empty_like(self.device_objects)
        blocks = (CUR_START + count * TOKENS) // BLOCK + 64
        if shape.latent:
            self.caches = [
                torch.zeros((blocks, BLOCK, shape.size), device="cuda", dtype=torch.bfloat16)
                for _ in range(shape.layers)
            ]
        else:
            cells = (2, blocks, BLOCK, shape.heads, shape.size)
            self.caches = [torch.zeros(cells, device="cuda", dtype=torch.bfloat16) for _ in range(shape.layers)]
        self.blocks = blocks
        self.width = shape.size - shape.latent if shape.latent else shape.size
        config = {"head_dim": self.width, "rope_theta": 500000.0, "max_position_embeddings": 1 << 16}
        self.table = torch.from_numpy(cos_sin_cache(config)).to(torch.bfloat16).cuda()
        self.block_table = np.random.default_rng(0).permutation(blocks)
        windows = ((shape.latent, self.width),) if shape.latent else ()
        self.layout = kvsplice.PagedLayout.from_format(3 if shape.latent else 1, self.caches)
        self.rope = kvsplice.RopeTables([self.table], shape.size, not shape.latent, group_windows=windows)
        self.splicer = kvsplice.Splicer(self.layout, self.rope, chunk_tokens=TOKENS, cuda=options)
        self.positions = [(OLD_START + i * TOKENS, CUR_START + i * TOKENS) for i in range(count)]
        size = self.device_objects[0].nbytes
        self.pinned_chunks = self._chunks([self.pinned_objects[i].data_ptr() for i in range(count)], size)
        self.device_chunks = self._chunks([self.device_objects[i].data_ptr() for i in range(count)], size)

    def _chunks(self, pointers: list[int], size: int) -> list[kvsplice.Chunk]:
        return [
            kvsplice.Chunk(StagedMemory(pointer, size), old, cur)
            for pointer, (old, cur) in zip(pointers, self.positions, strict=True)
        ]

    def raw_h2d(self) -> None:
        """One copy per chunk to contiguous device memory."""
        for i in range(self.count):
            self.scratch[i].copy_(self.pinned_objects[i], non_blocking=True)

    def raw_d2d(self) -> None:
        """One copy from device memory to device memory."""
        self.scratch.copy_(self.device_objects)

    def methods(self) -> dict[str, Callable[[], None]]:
        """Raw copies, and kvsplice's ways in: whole calls, and calls whose plan was made before."""
        splicer, table = self.splicer, self.block_table
        pinned, near = splicer.plan(self.pinned_chunks, table), splicer.plan(self.device_chunks, table)
        return {
            "raw host to device": self.raw_h2d,
            "raw device to device": self.raw_d2d,
            "kvsplice staged": lambda: _done(splicer.splice(self.pinned_chunks, table, path="staged")),
            "kvsplice staged, planned": lambda: _done(splicer.run(pinned, path="staged")),
            "kvsplice direct, planned": lambda: _done(splicer.run(pinned, path="direct")),
            "kvsplice device": lambda: _done(splicer.splice(self.device_chunks, table)),
            "kvsplice device, planned": lambda: _done(splicer.run(near)),
        }

    def close(self) -> None:
        """Free the splicer's memory."""
        self.splicer.close()


def _done(result: kvsplice.SpliceResult) -> None:
    """Bench methods return nothing."""


class LMCache:
    """LMCache's compiled operations, called as its blend module calls them on a GPU."""

    MAX_BATCH = 4

    def __init__(self, folder: Path, rig: Rig) -> None:
        path = next(iter(sorted(folder.rglob("c_ops*.so"))))
        spec = importlib.util.spec_from_file_location("c_ops", path)
        assert spec is not None
        assert spec.loader is not None
        self.ops = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.ops)
        self.rig, shape = rig, rig.shape
        self.format = (
            self.ops.EngineKVFormat.NL_X_NB_BS_HS if shape.latent else self.ops.EngineKVFormat.NL_X_TWO_NB_BS_NH_HS
        )
        self.temp = torch.empty_like(
            rig.device_objects[: self.MAX_BATCH].repeat(self.MAX_BATCH, 1, 1, 1, 1)[: self.MAX_BATCH]
        )
        self.pointers = torch.tensor([cache.data_ptr() for cache in rig.caches], dtype=torch.int64, device="cuda")
        self.ramp = torch.arange(TOKENS, device="cuda").repeat(shape.layers)
        self.block_ids = torch.from_numpy(rig.block_table).cuda()
        self.slots = torch.empty(rig.count * TOKENS, dtype=torch.int64, device="cuda")
        self.slots_pinned = torch.empty(rig.count * TOKENS, dtype=torch.int64, pin_memory=True)

    def methods(self) -> dict[str, Callable[[], None]]:
        """The ways in that this version has for this shape."""
        if hasattr(self.ops, "execute_cb_retrieve_plan_flat"):
            tables = self.plan()
            return {"plan": lambda: self.execute(self.plan()), "plan, planned": lambda: self.execute(tables)}
        if self.rig.shape.latent:
            return {}
        return {
            "ops": lambda: self.loop(self.rig.pinned_objects),
            "ops, device": lambda: self.loop(self.rig.device_objects),
        }

    def loop(self, objects: torch.Tensor) -> None:
        """0.5.2: batches of four; copy in, rotate each, concatenate, scatter by token."""
        rig, shape = self.rig, self.rig.shape
        for start in range(0, rig.count, self.MAX_BATCH):
            batch = range(start, min(start + self.MAX_BATCH, rig.count))
            for slot, index in enumerate(batch):
                self.temp[slot].copy_(objects[index], non_blocking=True)
            for slot, index in enumerate(batch):
                old, cur = rig.positions[index]
                keys = self.temp[slot][0].reshape(shape.layers * TOKENS, shape.heads, shape.size)
                self.ops.rotary_embedding_k_fused(old + self.ramp, cur + self.ramp, keys, shape.size, rig.table, True)
            positions = torch.cat(
                [torch.arange(cur, cur + TOKENS, device="cuda") for _, cur in (rig.positions[i] for i in batch)]
            )
            slots = self.block_ids[positions // BLOCK] * BLOCK + positions % BLOCK
            joined = torch.cat([self.temp[slot] for slot in range(len(batch))], dim=2)
            self.ops.multi_layer_kv_transfer(
                joined,
                self.pointers,
                slots,
                joined.device,
                rig.blocks * BLOCK,
                self.ops.TransferDirection.H2D,
                self.format,
                block_size=BLOCK,
                head_size=shape.size,
            )

    def execute(self, tables: tuple[Any, ...]) -> None:
        """0.5.3: one native call."""
        self.ops.execute_cb_retrieve_plan_flat(self.slots.device, 1 << 62, *tables)

    def plan(self) -> tuple[Any, ...]:
        """0.5.3: int64 tables; waves of two chunks in alternating halves of four slots."""
        rig, shape = self.rig, self.rig.shape
        positions = np.arange(CUR_START, CUR_START + rig.count * TOKENS)
        block, offset = np.divmod(positions, BLOCK)
        self.slots_pinned.numpy()[:] = rig.block_table[block] * BLOCK + offset
        self.slots.copy_(self.slots_pinned, non_blocking=True)
        spec = self.ops.CBGroupSpec(
            paged_kv_ptrs=self.pointers.data_ptr(),
            temp_buffer_ptrs=[self.temp[slot].data_ptr() for slot in range(self.MAX_BATCH)],
            num_layers=shape.layers,
            slot_tokens=TOKENS,
            hidden_elems=shape.hidden,
            element_size=2,
            engine_kv_format=self.format,
            page_buffer_size=rig.blocks * BLOCK,
            block_size=BLOCK,
            head_size=shape.size,
            slot_mapping_base=self.slots.data_ptr(),
            slot_mapping_capacity=len(positions),
            is_neox=not shape.latent,
            cos_sin_cache=rig.table.data_ptr(),
            rot_dim=rig.width,
            rope_num_kv_heads=shape.heads,
            rope_head_stride=shape.size,
            key_scalar_type=15,
            rope_base_offset=shape.latent * 2,
        )
        order = np.arange(rig.count)
        wave = self.MAX_BATCH // 2
        slot = (order // wave % 2) * wave + order % wave
        nbytes = rig.pinned_objects[0].nbytes
        temp = np.array([self.temp[i].data_ptr() for i in range(self.MAX_BATCH)])
        source = rig.pinned_objects.data_ptr() + order * nbytes
        zeros = np.zeros_like(order)
        old, cur = (np.array(column) for column in zip(*rig.positions, strict=True))
        ends = np.minimum(np.arange(wave, rig.count + wave, wave), rig.count)
        return (
            [spec],
            np.stack([temp[slot], source, zeros + nbytes, zeros], axis=1),
            np.stack([zeros, slot, old, cur], axis=1),
            np.stack([zeros, slot, order * TOKENS, zeros + TOKENS], axis=1),
            np.stack([ends, ends, ends], axis=1),
        )


def measure(methods: dict[str, Callable[[], None]], rounds: int) -> dict[str, dict[str, float]]:
    """Time every method, one after the other in each round.

    ``ms``: device time from an idle stream, so with the host's share before the first kernel. ``busy_ms``: device time
    behind a kernel that keeps the stream busy while the host enqueues; not for copies from the host, which do not wait
    for it.
    ``cpu_us``: how long the call took. Medians; p10 and p90 are percentiles.
    """
    samples: dict[str, dict[str, list[float]]] = {name: {"ms": [], "busy_ms": [], "cpu_us": []} for name in methods}
    for index in range(rounds + 3):
        for name, method in methods.items():
            for kind in ("ms", "busy_ms") if "device" in name and "host" not in name else ("ms",):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda.synchronize()
                if kind == "busy_ms":
                    torch.cuda._sleep(20_000_000)
                begin.record()
                started = time.perf_counter()
                method()
                called = time.perf_counter() - started
                end.record()
                torch.cuda.synchronize()
                if index >= 3:
                    samples[name][kind].append(begin.elapsed_time(end))
                    samples[name]["cpu_us"].append(called * 1e6)
    result = {}
    for name, kinds in samples.items():
        result[name] = {}
        for kind, values in kinds.items():
            if values:
                result[name][kind] = statistics.median(values)
                result[name][f"{kind}_p10"], result[name][f"{kind}_p90"] = (
                    float(np.percentile(values, q)) for q in (10, 90)
                )
    return result


def errors(rig: Rig, methods: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Relative error of K against the K that the engine would have computed in float64, for K stored as bf16."""
    shape = rig.shape
    generator = torch.Generator(device="cuda").manual_seed(1)
    raw = torch.randn((TOKENS, rig.width), device="cuda", dtype=torch.float64, generator=generator)
    rows = rig.table.double()
    half = rig.width // 2

    def turn(values: torch.Tensor, start: int) -> torch.Tensor:
        cos, sin = rows[start : start + TOKENS, :half], rows[start : start + TOKENS, half:]
        x, y = (values[:, :half], values[:, half:]) if not shape.latent else (values[:, 0::2], values[:, 1::2])
        first, second = x * cos - y * sin, y * cos + x * sin
        if not shape.latent:
            return torch.cat([first, second], dim=1)
        return torch.stack([first, second], dim=2).reshape(TOKENS, -1)

    old, cur = rig.positions[0]
    stored, truth = turn(raw, old).to(torch.bfloat16), turn(raw, cur)
    keys = slice(shape.latent, None)
    for objects in (rig.pinned_objects, rig.device_objects):
        objects[0, 0, 0].reshape(TOKENS, shape.heads, shape.size)[:, 0, keys] = stored.to(objects.device)
    positions = np.arange(cur, cur + TOKENS)
    block = torch.from_numpy(rig.block_table[positions // BLOCK]).cuda()
    offset = torch.from_numpy(positions % BLOCK).cuda()
    result = {}
    for name, method in methods.items():
        method()
        torch.cuda.synchronize()
        cache = rig.caches[0] if shape.latent else rig.caches[0][0][:, :, 0]
        got = cache[block, offset][:, keys].double()
        result[name] = float((got - truth).norm() / truth.norm())
    storing, writing = stored.double() - turn(raw, old), truth.to(torch.bfloat16).double() - truth
    result["rounding alone"] = float((storing.norm() ** 2 + writing.norm() ** 2).sqrt() / truth.norm())
    return result


def run(lmcache: Path | None, counts: list[int], shapes: list[str]) -> dict[str, Any]:
    """All measurements of one process."""
    results: dict[str, Any] = {
        "lmcache": str(lmcache.name) if lmcache else None,
        "times": {},
        "errors": {},
        "blocks": {},
    }
    for name in shapes:
        shape = SHAPES[name]
        for count in counts:
            rig = Rig(shape, count)
            methods = rig.methods()
            peer = LMCache(lmcache, rig).methods() if lmcache else {}
            methods |= {f"LMCache {method}": call for method, call in peer.items()}
            rounds = {1: 60, 4: 40, 16: 20}.get(count, 12)
            results["times"][f"{name}|{count}"] = {"bytes": rig.nbytes, **measure(methods, rounds)}
            if count == 1:
                results["errors"][name] = errors(
                    rig, {key: call for key, call in methods.items() if not key.startswith("raw")}
                )
            rig.close()
            del rig, methods, peer
            torch.cuda.empty_cache()
    if lmcache is None:
        for blocks in (16, 33, 66, 132, 264, 528, None):
            rig = Rig(
                SHAPES["Llama-3-8B"], 16, CudaOptions(device_blocks=blocks, staged_blocks=blocks, direct_blocks=blocks)
            )
            methods = {name: call for name, call in rig.methods().items() if name.endswith("planned")}
            results["blocks"][str(blocks)] = measure(methods, 15)
            rig.close()
            del rig, methods
            torch.cuda.empty_cache()
    return results


def table(results: dict[str, Any]) -> str:
    """Times as Markdown."""
    lines = []
    for key, entry in results["times"].items():
        name, count = key.split("|")
        nbytes = entry["bytes"]
        lines += [f"\n{name}, {count} chunks, {nbytes / 1e6:.1f} MB\n"]
        lines += [
            "| way | ms (p10 to p90) | GB/s | of raw | behind a busy stream: ms | of raw | CPU us |",
            "|---|---|---|---|---|---|---|",
        ]
        for method, values in entry.items():
            if method == "bytes":
                continue
            raw = entry["raw device to device" if "busy_ms" in values else "raw host to device"]
            busy = "|"
            if "busy_ms" in values:
                busy = f"{values['busy_ms']:.3f} | {100 * raw['busy_ms'] / values['busy_ms']:.1f} %"
            spread = f"{values['ms']:.3f} ({values['ms_p10']:.3f} to {values['ms_p90']:.3f})"
            rate, share = nbytes / values["ms"] / 1e6, 100 * raw["ms"] / values["ms"]
            lines.append(f"| {method} | {spread} | {rate:.1f} | {share:.1f} % | {busy} | {values['cpu_us']:.0f} |")
    for name, values in results["errors"].items():
        lines += [
            f"\nrelative error of K, {name}: " + ", ".join(f"{method} {value:.3e}" for method, value in values.items())
        ]
    for blocks, values in results["blocks"].items():
        lines += [
            f"\nat most {blocks} blocks: "
            + ", ".join(f"{method} {value.get('busy_ms', value['ms']):.3f} ms" for method, value in values.items())
        ]
    return "\n".join(lines)


def main() -> None:
    """Run every process, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--lmcache", type=Path, action="append", default=[], help="unpacked wheel; may be given several times"
    )
    parser.add_argument("--out", type=Path, help="write all figures here, as JSON")
    parser.add_argument("--counts", default="1,4,16,64", help="chunks, comma-separated")
    parser.add_argument("--shapes", default="|".join(SHAPES), help="shapes, separated by |")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    counts, shapes = [int(count) for count in arguments.counts.split(",")], arguments.shapes.split("|")
    if arguments.child:
        json.dump(run(arguments.lmcache[0] if arguments.lmcache else None, counts, shapes), sys.stdout)
        return
    import cupy

    versions = {
        "CUDA driver": cupy.cuda.runtime.driverGetVersion(),
        "torch": torch.__version__,
        "CuPy": cupy.__version__,
        "kvsplice": importlib.metadata.version("kvsplice"),
    }
    words = [word if word.startswith("-") else Path(word).name for word in sys.argv]
    print(", ".join([str(date.today()), torch.cuda.get_device_name(), *(f"{k} {v}" for k, v in versions.items())]))
    print("command: python", *words)
    everything = []
    for lmcache in [None, *arguments.lmcache]:
        command = [sys.executable, __file__, "--child", "--counts", arguments.counts, "--shapes", arguments.shapes]
        if lmcache:
            command += ["--lmcache", str(lmcache)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        if done.returncode:
            print(f"\n## {lmcache.name if lmcache else 'kvsplice alone'}: failed with {done.returncode}")
            continue
        results = json.loads(done.stdout)
        everything.append(results)
        print(f"\n## with {results['lmcache'] or 'kvsplice alone'}\n{table(results)}", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
