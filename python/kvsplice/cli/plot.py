"""Reuse and latency over the run, as a PNG."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsplice.cli.errors import CliError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["check_plot", "write_plot"]

_BINS = 120
_COLOURS = {"prefix-reusable": "#0072b2", "non-prefix-reusable": "#e69f00", "not reusable": "#d9d9d9"}


def _matplotlib(module: str) -> Any:
    try:
        return importlib.import_module(f"matplotlib.{module}")
    except ImportError:
        raise CliError("--plot needs the package matplotlib: pip install 'kvsplice[plot]'") from None


def check_plot(path: str) -> None:
    """Raise `CliError` before a long run if `write_plot` could not write its file afterwards."""
    _matplotlib("figure")
    target = Path(path)
    if target.suffix.lower() != ".png":
        raise CliError(f"{path}: --plot writes PNG; give a name that ends in .png")
    if target.is_dir() or not target.parent.is_dir():
        raise CliError(f"{path}: no such directory, or a directory itself")


def write_plot(path: str, columns: dict[str, NDArray[np.int64]], title: str) -> None:
    """Draw the shares of reuse above the match latency, both over the number of requests.

    Parameters
    ----------
    path : str
        Where the PNG goes.
    columns : dict of str to numpy.ndarray
        As `kvsplice.cli.replay.Replay.columns` returns them.
    title : str
        Written above.
    """
    requests = len(columns["tokens"])
    edges = np.unique(np.linspace(0, requests, min(_BINS, requests) + 1).astype(np.int64))
    starts = edges[:-1]
    sums = {
        name: np.add.reduceat(columns[name], starts) if requests else starts for name in ("tokens", "prefix", "other")
    }
    total = np.maximum(sums["tokens"], 1)
    shares = [sums["prefix"] / total, sums["other"] / total]
    shares.append(1.0 - shares[0] - shares[1])

    # The object interface, which needs no display and leaves no state behind.
    figure = _matplotlib("figure").Figure(figsize=(9, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    # Steps: the value of a bin holds from its first request to the next bin's.
    steps = [np.append(share, share[-1:]) * 100 for share in shares]
    at = edges if requests else np.zeros(0)
    upper.stackplot(at, steps, labels=list(_COLOURS), colors=list(_COLOURS.values()), step="post")
    upper.set(ylabel="share of tokens (%)", ylim=(0, 100), title=title)
    upper.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=3, frameon=False)

    slowest = columns["latencies"].max(axis=1) / 1e6 if requests else np.zeros(0)
    bins = np.split(slowest, starts[1:]) if requests else []
    for label, level, colour in (("p50", 50, "#0072b2"), ("max", 100, "#d55e00")):
        lower.plot(
            starts, [np.percentile(part, level) for part in bins], label=label, color=colour, drawstyle="steps-post"
        )
    lower.set(xlabel="request", ylabel="match latency (ms)", xlim=(0, max(requests, 1)))
    if requests:
        lower.set_yscale("log")
        lower.legend(frameon=False)
    lower.grid(alpha=0.3)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise CliError(f"{path}: {error.strerror or error}") from None
