"""Builds the workloads and the tokenizer of ``kvsplice demo`` from texts that come with CPython.

Run it with the package ``tokenizers`` at hand::

    python benches/build_demo_workload.py

It writes to ``python/kvsplice/data/demo``. The same version of Python and of ``tokenizers`` gives the same bytes. The
texts are the language reference as ``help()`` shows it and modules of the standard library; the prompts around them are
written here.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import random
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

SEED = 20_260_801
VOCABULARY = 4096
TARGET = Path(__file__).resolve().parents[1] / "python" / "kvsplice" / "data" / "demo"

INSTRUCTIONS = """You answer questions about the Python language. Use only the documents below. Say so when they do not
hold the answer. Quote the rule that decides the matter, name the document that it is from, and give a short example
that runs as it stands. Do not speculate about other versions of the language.
"""

CHAT_SYSTEM = """You are a tutor for the Python language. You explain one topic at a time, in the words of the language
reference, and wait for the next question. You may refer back to what was said earlier in the conversation.
"""

AGENT_SYSTEM = """You are a programming agent. You work in steps. In each step you call a tool or give your answer.

Tools:
- read_file(path): returns the text of a file of the standard library.
- note(text): stores a remark for the final report.

Rules: read a file before you make a statement about it, and read it again when you are about to quote it. Quote
function names exactly. Do not modify files. Finish with a report of what you found.
"""

QUESTIONS = [
    "What is evaluated first, and where is that stated?",
    "Which exceptions can this raise, and when?",
    "Summarize the differences between these documents in three sentences.",
    "Which of these rules changed the meaning of older programs?",
    "Give the shortest program that shows the rule in the second document.",
    "What would a reader of these documents most likely get wrong?",
]

TASKS = [
    "Find every function that takes a key argument and say how it is used.",
    "Which of these modules could share code? Name the functions.",
    "List the public names and the one that most needs a better docstring.",
    "Look for functions that modify their arguments in place.",
    "Say which modules import others at the time of a call, and why.",
    "Write a report on how errors are raised in these modules.",
]

FILES = [
    "bisect.py", "colorsys.py", "copy.py", "fnmatch.py", "glob.py", "heapq.py", "keyword.py", "linecache.py",
    "operator.py", "queue.py", "reprlib.py", "sched.py", "shlex.py", "stat.py", "textwrap.py", "token.py",
]  # fmt: skip


def cut(text: str, limit: int) -> str:
    """Return the text up to the last blank line before ``limit`` characters."""
    return text if len(text) <= limit else text[: text.rindex("\n\n", 0, limit)]


def shuffled_documents(chance: random.Random) -> list[dict[str, Any]]:
    """Make retrieval prompts: instructions, four documents in any order, a question. Some documents are popular."""
    names = sorted(name for name, text in topics.items() if len(text) >= 4000)
    chance.shuffle(names)
    names = names[:24]
    weights = [1 / (1 + rank) ** 0.7 for rank in range(len(names))]
    requests = []
    for _ in range(48):
        chosen: dict[str, None] = {}
        while len(chosen) < 4:
            chosen.update(dict.fromkeys(chance.choices(names, weights)))
        order = list(chosen)
        chance.shuffle(order)
        documents = "\n\n".join(f"# Document: {name}\n\n{cut(topics[name], 9000).strip()}" for name in order)
        requests.append({"text": f"{INSTRUCTIONS}\n{documents}\n\nQuestion: {chance.choice(QUESTIONS)}\nAnswer:"})
    return requests


def growing_conversations(chance: random.Random, turns: int = 14, window: int = 8) -> list[dict[str, Any]]:
    """Make conversations that take turns with each other; each drops its oldest exchanges when it gets too long."""
    names = sorted(name for name, text in topics.items() if 1200 <= len(text) <= 7000)
    histories: list[list[tuple[str, str]]] = [[] for _ in range(4)]
    plans = [chance.sample(names, turns) for _ in histories]
    requests = []
    for turn in range(turns):
        for history, plan in zip(histories, plans, strict=True):
            question = f"Please explain the topic {plan[turn]!r}."
            messages = [{"role": "system", "content": CHAT_SYSTEM}]
            for asked, answered in history[-window:]:
                messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
            messages.append({"role": "user", "content": question})
            requests.append({"messages": messages})
            history.append((question, cut(topics[plan[turn]], 3000).strip()))
    return requests


def agent_loops(chance: random.Random) -> list[dict[str, Any]]:
    """Make runs of agents that read some files in their own order, one a step, and one of them a second time."""
    library = Path(sysconfig.get_path("stdlib"))
    texts = {name: cut((library / name).read_text(encoding="utf-8"), 9000) for name in FILES}
    requests = []
    for task in TASKS:
        order = chance.sample(FILES, 6)
        order.insert(5, order[1])
        messages = [{"role": "system", "content": AGENT_SYSTEM}, {"role": "user", "content": task}]
        for name in order:
            requests.append({"messages": list(messages)})
            messages.append({"role": "assistant", "content": f"read_file({name!r})"})
            messages.append({"role": "tool", "content": texts[name]})
        requests.append({"messages": list(messages)})
    return requests


def train(requests: list[dict[str, Any]]) -> tokenizers.Tokenizer:
    """Train a byte-level BPE on the texts themselves: small, and without a download."""
    seen: dict[str, None] = {}
    for request in requests:
        for message in request.get("messages", [{"content": request.get("text", "")}]):
            seen[message["content"]] = None
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(seen, trainer)
    return tokenizer


def write_jsonl(path: Path, requests: list[dict[str, Any]]) -> None:
    """Write JSON lines, compressed without a date so that the bytes depend on the content alone."""
    text = "".join(json.dumps(request, ensure_ascii=False) + "\n" for request in requests)
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", type=Path, default=TARGET, help="where the files go (default: %(default)s)")
    target: Path = parser.parse_args().target
    target.mkdir(parents=True, exist_ok=True)
    shapes = {
        "documents": shuffled_documents(random.Random(SEED)),
        "conversation": growing_conversations(random.Random(SEED + 1)),
        "agent": agent_loops(random.Random(SEED + 2)),
    }
    for name, requests in shapes.items():
        write_jsonl(target / f"{name}.jsonl.gz", requests)
    tokenizer = train([request for requests in shapes.values() for request in requests])
    (target / "tokenizer.json").write_text(tokenizer.to_str() + "\n", encoding="utf-8")
    licence = Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
    (target / "LICENSE.python").write_bytes(licence.read_bytes())
    (target / "README.md").write_text(
        "# Demo workload\n\n"
        "Made by `benches/build_demo_workload.py`; do not edit.\n\n"
        f"The texts are from CPython {platform.python_version()} (language reference as shown by `help()`, modules of\n"
        "the standard library, cut to some thousand characters). They are under the licence in `LICENSE.python`. The\n"
        f"tokenizer is a byte-level BPE of {VOCABULARY} tokens trained on the same texts with tokenizers "
        f"{tokenizers.__version__}.\n",
        encoding="utf-8",
    )
    for path in sorted(target.iterdir()):
        print(f"{path.stat().st_size:>9,}  {path.name}")


if __name__ == "__main__":
    main()
