"""The bundled workloads of ``kvsplice demo``; ``benches/build_demo_workload.py`` makes the files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

__all__ = ["DEMO_NOTE", "DEMO_SHAPES", "DEMO_TOKENIZER", "Shape"]

_DATA = Path(__file__).resolve().parents[1] / "data" / "demo"

DEMO_TOKENIZER = str(_DATA / "tokenizer.json")


class Shape(NamedTuple):
    """One bundled workload."""

    name: str
    title: str
    meaning: str
    """What its report shows, in a sentence."""

    @property
    def path(self) -> str:
        """The file of its requests."""
        return str(_DATA / f"{self.name}.jsonl.gz")


DEMO_SHAPES = (
    Shape(
        "documents",
        "Retrieval: instructions, four documents in any order, a question",
        "A prefix cache helps only as far as the documents come in an order seen before, counted from the first; the "
        "KV of the others is there all the same, except for the chunks at the seams.",
    ),
    Shape(
        "conversation",
        "Conversation: it grows turn by turn, and drops its oldest turns when it gets long",
        "While a conversation only grows, a prefix cache finds nearly all there is to find; what kvsplice adds comes "
        "from the turns that are left after the oldest were dropped.",
    ),
    Shape(
        "agent",
        "Agent: it reads files step by step, and other runs read some of the same files",
        "Within a run the prefix cache does the work; kvsplice adds the files that the run or an earlier one has read "
        "behind other text.",
    ),
)

DEMO_NOTE = (
    "Reusable means that the KV of this very text was computed before. KV that was computed behind other text needs "
    "its positions corrected, and is an approximation even then."
)
