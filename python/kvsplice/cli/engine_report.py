"""What a replay through the engine found, as a dictionary for JSON and as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kvsplice.cli.engine_replay import EngineReplay
    from kvsplice.cli.workload import Workload

__all__ = ["render_engine", "summarize_engine"]

_GLOSSES = {
    "prefix_hit": "what prefix caching reuses",
    "retained_hit": "behind a gap of the prefix",
    "non_prefix_hit": "what kvsplice adds",
    "computed": "",
}


def summarize_engine(replay: EngineReplay, workload: Workload) -> dict[str, Any]:
    """Return the result of a run; ``docs/replay.md`` lists the fields."""
    total, prefix, retained, other = (sum(c) for c in (replay.tokens, replay.prefix, replay.retained, replay.other))
    tokens = {
        "total": total,
        "prefix_hit": prefix,
        "retained_hit": retained,
        "non_prefix_hit": other,
        "computed": total - prefix - retained - other,
        "preamble": sum(replay.preamble),
    }
    status = replay.engine.report_status()
    return {
        "complete": replay.complete,
        "correct": replay.correct,
        "formats": dict(workload.formats),
        "settings": replay.settings._asdict() | replay.engine_settings._asdict(),
        "requests": replay.requests,
        "skipped_lines": workload.skipped,
        "first_skipped": workload.first_skipped,
        "tokens": tokens,
        "share": {name: tokens[name] / total if total else 0.0 for name in _GLOSSES},
        "spliced_bytes": sum(replay.spliced_bytes),
        "largest_key_error": replay.key_error,
        "key_error_bound": replay.bound,
        "wrong_values": replay.wrong_values,
        "not_spliced": replay.not_spliced,
        "guards_intact": replay.guards_intact,
        "stages": {stage: _times(np.asarray(column)) for stage, column in replay.nanoseconds.items()},
        "matcher": status["matcher"],
        "memory": status["memory"],
        "events": replay.engine.bus.counts(),
        "elapsed_seconds": replay.elapsed,
    }


def _times(nanoseconds: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, float | None]:
    if not len(nanoseconds):
        return dict.fromkeys(("p50_ms", "p99_ms", "max_ms", "total_seconds"))
    p50, p99, largest = (float(each) / 1e6 for each in np.percentile(nanoseconds, [50, 99, 100]))
    return {"p50_ms": p50, "p99_ms": p99, "max_ms": largest, "total_seconds": float(nanoseconds.sum()) / 1e9}


def render_engine(summary: dict[str, Any]) -> str:
    """Return the report as text, without a newline at the end."""
    settings, tokens, memory = summary["settings"], summary["tokens"], summary["memory"]
    rows = [("requests", f"{summary['requests']:>15,}" + ("" if summary["complete"] else "   (interrupted)"))]
    total = f"{tokens['total']:>15,}"
    if settings["shift"]:
        total += f"   {tokens['preamble']:,} of them preambles (--shift)"
    rows.append(("tokens", total))
    for name, gloss in _GLOSSES.items():
        if name != "retained_hit" or settings["segmented_prefix"]:
            share = f"{tokens[name]:>15,}   {summary['share'][name]:6.1%}   {gloss}"
            rows.append((f"  {name.replace('_', ' ')}", share.rstrip()))
    rows.append(("spliced", f"{summary['spliced_bytes']:>15,}   bytes, on {_device(settings)}"))
    rows += [(f"  {stage.replace('_', ' ')}", _times_text(times)) for stage, times in summary["stages"].items()]
    held = f"{memory['bytes']:>15,}   of {memory['capacity']:,} bytes: {memory['objects']:,} objects"
    rows.append(("memory", f"{held}, {memory['evictions']:,} evicted"))
    if settings["disk"] is not None:
        rows.append(("disk", f"{memory['disk_bytes']:>15,}   bytes: {memory['disk_objects']:,} objects"))
    struck = summary["matcher"]["struck_out"]
    rows.append(("index", f"{summary['matcher']['entries']:>15,}   chunks; {struck:,} left it as their KV was gone"))
    if summary["skipped_lines"]:
        rows.append(("skipped lines", f"{summary['skipped_lines']:>15,}   first: {summary['first_skipped']}"))
    rows.append(("verified", _verdict(summary)))
    return "\n".join(f"{label:<22}{text}" for label, text in rows)


def _device(settings: dict[str, Any]) -> str:
    shape = f"{settings['layers']} layers of {settings['heads']} heads of {settings['head_size']}"
    return f"{settings['device']}: {shape}, {settings['dtype']}"


def _times_text(times: dict[str, float | None]) -> str:
    if times["p50_ms"] is None:
        return f"{'-':>15}"
    return f"{times['p50_ms']:>12.3f} ms   p50, p99 {times['p99_ms']:.3f} ms, max {times['max_ms']:.3f} ms"


def _verdict(summary: dict[str, Any]) -> str:
    if summary["correct"]:
        error, bound = summary["largest_key_error"], summary["key_error_bound"]
        return f"{'all':>15}   V equal in every bit, K to {error:.2g} (at most {bound:.2g} allowed)"
    wrong = []
    if summary["wrong_values"]:
        wrong.append(f"{summary['wrong_values']:,} elements of V differ")
    if summary["largest_key_error"] > summary["key_error_bound"]:
        wrong.append(f"K is off by {summary['largest_key_error']:.3g}")
    if summary["not_spliced"]:
        wrong.append(f"{summary['not_spliced']:,} requests found KV and did not get it")
    if not summary["guards_intact"]:
        wrong.append("blocks of others were written")
    return f"{'WRONG':>15}   {'; '.join(wrong)}"
