"""What each command does with its arguments."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsplice.cli.demo import DEMO_NOTE, DEMO_SHAPES, DEMO_TOKENIZER
from kvsplice.cli.doctor import Status, examine
from kvsplice.cli.engine_replay import EngineReplay, EngineSettings
from kvsplice.cli.engine_report import render_engine, summarize_engine
from kvsplice.cli.errors import CliError
from kvsplice.cli.plot import check_plot, write_plot
from kvsplice.cli.progress import Progress
from kvsplice.cli.replay import Replay, Settings
from kvsplice.cli.report import render, summarize
from kvsplice.cli.tokenizer import TextTokenizer
from kvsplice.cli.workload import Workload, check_files

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

__all__ = ["run_demo", "run_doctor", "run_replay"]

_INTERRUPTED = 130


def run_replay(arguments: argparse.Namespace) -> int:
    """Replay files; return the exit code."""
    check_files(arguments.files)
    given = {name: getattr(arguments, name) for name in EngineSettings._fields if getattr(arguments, name) is not None}
    _check_engine_options(arguments, given)
    if arguments.plot is not None:
        check_plot(arguments.plot)
    tokenizer = None if arguments.tokenizer is None else TextTokenizer(arguments.tokenizer)
    settings = Settings(
        chunk_size=arguments.chunk_size,
        capacity=arguments.capacity,
        threads=arguments.threads,
        every_occurrence=not arguments.first_occurrence,
        shift=arguments.shift,
        seed=arguments.seed,
        limit=arguments.limit,
    )
    with Progress(arguments.files, arguments.limit, not arguments.no_progress) as progress:
        workload = Workload(
            arguments.files,
            arguments.format,
            tokenizer,
            arguments.scope_field,
            arguments.skip_bad,
            progress.at_byte,
        )
        if arguments.engine:
            return _replay_engine(EngineReplay(settings, EngineSettings(**given)), workload, progress, arguments.json)
        replay = Replay(settings)
        replay.run(workload, progress.request_done)
    _print(summarize(replay, workload), arguments.json)
    if arguments.plot is not None:
        write_plot(arguments.plot, replay.columns(), ", ".join(Path(file).name for file in arguments.files))
    return 0 if replay.complete else _INTERRUPTED


def _check_engine_options(arguments: argparse.Namespace, given: dict[str, Any]) -> None:
    def option(name: str) -> str:
        return f"--{name.replace('_', '-')}"

    if not arguments.engine:
        for name in given:
            raise CliError(f"{option(name)}: needs --engine")
        return
    for name, unset in (("threads", 1), ("first_occurrence", False), ("plot", None)):
        if getattr(arguments, name) != unset:
            raise CliError(f"{option(name)}: not with --engine")


def _replay_engine(replay: EngineReplay, workload: Workload, progress: Progress, as_json: bool) -> int:
    try:
        replay.run(workload, progress.request_done)
        summary = summarize_engine(replay, workload)
    finally:
        replay.close()
    progress.close()
    _print(summary, as_json, render_engine)
    if not replay.complete:
        return _INTERRUPTED
    return 0 if replay.correct else 1


def run_demo(arguments: argparse.Namespace) -> int:
    """Replay the bundled workloads; return the exit code."""
    results: dict[str, Any] = {}
    tokenizer = TextTokenizer(DEMO_TOKENIZER)
    for shape in DEMO_SHAPES:
        replay = Replay(Settings(chunk_size=arguments.chunk_size))
        with Progress([shape.path], None, not arguments.no_progress) as progress:
            workload = Workload([shape.path], tokenizer=tokenizer, on_progress=progress.at_byte)
            replay.run(workload, progress.request_done)
        results[shape.name] = summarize(replay, workload)
        if not arguments.json:
            print(
                f"{shape.title}\n\n{render(results[shape.name])}\n\n{textwrap.fill(shape.meaning, 100)}\n", flush=True
            )
        if not replay.complete:
            break
    if arguments.json:
        _print(results, as_json=True)
    else:
        print(textwrap.fill(DEMO_NOTE, 100))
    return 0 if all(result["complete"] for result in results.values()) else _INTERRUPTED


def run_doctor(arguments: argparse.Namespace) -> int:
    """Examine this machine; return the exit code."""
    checks = []
    for check in examine():
        checks.append(check)
        if not arguments.json:
            advice = f"\n{'':28}-> {check.advice}" if check.advice else ""
            print(f"{check.status.value:8} {check.name:18} {check.detail}{advice}", flush=True)
    healthy = all(check.status is not Status.FAILED for check in checks)
    if arguments.json:
        print(json.dumps({"healthy": healthy, "checks": [dataclasses.asdict(check) for check in checks]}, indent=2))
    return 0 if healthy else 1


def _print(summary: dict[str, Any], as_json: bool, to_text: Callable[[dict[str, Any]], str] = render) -> None:
    print(json.dumps(summary, indent=2) if as_json else to_text(summary))
