"""What a replay found, as a dictionary for JSON and as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kvsplice.cli.replay import Replay
    from kvsplice.cli.workload import Workload

__all__ = ["render", "summarize"]


def summarize(replay: Replay, workload: Workload) -> dict[str, Any]:
    """Return the result of a run; ``docs/replay.md`` lists the fields."""
    settings = replay.settings
    columns = replay.columns()
    total, prefix, other = (int(columns[name].sum()) for name in ("tokens", "prefix", "other"))
    rest = total - prefix - other
    stats = replay.stats()
    return {
        "complete": replay.complete,
        "formats": dict(workload.formats),
        "settings": settings._asdict(),
        "requests": replay.requests,
        "skipped_lines": workload.skipped,
        "first_skipped": workload.first_skipped,
        "tokens": {
            "total": total,
            "prefix_reusable": prefix,
            "non_prefix_reusable": other,
            "not_reusable": rest,
            "preamble": int(columns["preamble"].sum()),
        },
        "share": {
            "prefix_reusable": _share(prefix, total),
            "non_prefix_reusable": _share(other, total),
            "not_reusable": _share(rest, total),
        },
        "match_latency": _latency(columns["latencies"].reshape(-1), total * settings.threads),
        "matcher": stats._asdict(),
        "elapsed_seconds": replay.elapsed,
    }


def _share(part: int, total: int) -> float:
    return part / total if total else 0.0


def _latency(nanoseconds: np.ndarray[Any, np.dtype[np.int64]], tokens: int) -> dict[str, float | None]:
    if not len(nanoseconds):
        return dict.fromkeys(("p50_ms", "p99_ms", "max_ms", "ns_per_token"))
    p50, p99, largest = np.percentile(nanoseconds, [50, 99, 100]) / 1e6
    per_token = float(nanoseconds.sum()) / tokens if tokens else None
    return {"p50_ms": float(p50), "p99_ms": float(p99), "max_ms": float(largest), "ns_per_token": per_token}


def render(summary: dict[str, Any]) -> str:
    """Return the report as text, without a newline at the end."""
    settings, tokens, stats = summary["settings"], summary["tokens"], summary["matcher"]
    rows = [("requests", f"{summary['requests']:>15,}" + ("" if summary["complete"] else "   (interrupted)"))]
    total = f"{tokens['total']:>15,}"
    if settings["shift"]:
        total += f"   {tokens['preamble']:,} of them preambles (--shift)"
    rows.append(("tokens", total))
    for label, gloss in (
        ("prefix-reusable", "what prefix caching reuses"),
        ("non-prefix-reusable", "what kvsplice adds"),
        ("not reusable", "to be computed either way"),
    ):
        name = label.replace("-", "_").replace(" ", "_")
        rows.append((f"  {label}", f"{tokens[name]:>15,}   {summary['share'][name]:6.1%}   {gloss}"))
    rows.append(("match latency", _latency_text(summary["match_latency"], settings["threads"])))
    rows.append(
        ("entries", f"{stats['entries']:>15,}   of {stats['capacity']:,}; {stats['contents']:,} different texts")
    )
    memory = f"{stats['token_bytes'] + stats['overhead_bytes']:>15,}   bytes"
    memory += f": tokens {stats['token_bytes']:,}, all else {stats['overhead_bytes']:,}"
    rows.append(("memory", memory))
    rows.append(("evictions", f"{stats['evicted']:>15,}"))
    if summary["skipped_lines"]:
        rows.append(("skipped lines", f"{summary['skipped_lines']:>15,}   first: {summary['first_skipped']}"))
    return "\n".join(f"{label:<22}{text}" for label, text in rows)


def _latency_text(latency: dict[str, float | None], threads: int) -> str:
    if latency["p50_ms"] is None:
        return f"{'-':>15}"
    text = f"{latency['p50_ms']:>12.3f} ms   p50, p99 {latency['p99_ms']:.3f} ms, max {latency['max_ms']:.3f} ms"
    if latency["ns_per_token"] is not None:
        text += f"; {latency['ns_per_token']:.2f} ns per token"
    return text + (f"; {threads} threads at once" if threads > 1 else "")
