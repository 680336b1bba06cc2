"""The command line: ``asyncsync demo`` runs the library on this machine and shows what it does."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table

from asyncsync.report import format_bytes

if TYPE_CHECKING:
    from asyncsync.demo.language_model import ModelFiles
    from asyncsync.demo.progress import Step, Summary

ROWS = 12
"""Rows of progress, about."""

LONGEST_LINE = 300
"""Of an error's text; what is longer is advice, not the error."""

OBJECT_STORE_BYTES = 200_000_000
"""Shared memory of the throwaway cluster: weights do not pass through it."""

FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130

app = typer.Typer(
    help="asyncsync: weight updates for RL post-training, as awaited transactions.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def main() -> None:
    """Entry point of the ``asyncsync`` command."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"asyncsync {metadata.version('asyncsync')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps (100; with --model 4).")] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Use the weights of this language model: a Hugging Face folder or a GGUF file. "
            "Needs pip install 'asyncsync[models]'. The reward is then minus the loss."
        ),
    ] = None,
    json_wanted: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line, and the progress to stderr.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of weights, prompts and draws.")] = 0,
) -> None:
    """Let a small policy learn, on this machine's CPU, while its weights are updated in two rollout engines.

    One trainer and two engines run as processes of their own. The engines generate all the time; after each training
    step the new weights go to both. Takes half a minute; with --model, a minute and a half. Exits with 1 if the
    reward does not clearly rise, or if an engine's weights are ever not those that were sent.
    """
    console = Console(stderr=json_wanted, highlight=False)
    try:
        files = None if model is None else _find_model(model)
    except (FileNotFoundError, ModuleNotFoundError, ValueError) as error:
        raise _failure(console, str(error), WRONG_USE) from None
    try:
        summary = _run_demo(console, steps=steps, files=files, seed=seed)
    except KeyboardInterrupt:
        raise _failure(console, "interrupted", INTERRUPTED) from None
    except Exception as error:  # noqa: BLE001 - whatever it was, a newcomer is told in a line
        raise _failure(console, _in_words(error), FAILED) from None
    _show_summary(console, summary)
    if json_wanted:
        print(json.dumps(summary.as_json()), flush=True)
    for failure in summary.failures:
        console.print(f"[red]failed:[/] {failure}")
    if summary.failures:
        raise typer.Exit(FAILED)


def _find_model(path: Path) -> ModelFiles:
    from asyncsync.demo.language_model import find_model

    return find_model(path)


def _run_demo(console: Console, *, steps: int | None, files: ModelFiles | None, seed: int) -> Summary:
    from asyncsync.demo import language_loop, policy_loop

    start = time.perf_counter()
    progress = _Progress(console, language_model=files is not None)

    async def run() -> Summary:
        if files is None:
            return await policy_loop.run(steps=steps or policy_loop.STEPS, seed=seed, observer=progress)
        return await language_loop.run(files, steps=steps or language_loop.STEPS, seed=seed, observer=progress)

    console.print(POLICY_INTRODUCTION if files is None else LANGUAGE_INTRODUCTION.format(name=files.name))
    with progress:
        progress.stage("starting Ray on this machine")
        with _local_ray():
            gc.freeze()  # torch and Ray are a large heap: a full collection of it would stall the loop for 0.1 s
            summary = asyncio.run(run())
    return dataclasses.replace(summary, seconds=time.perf_counter() - start)


@contextmanager
def _local_ray() -> Iterator[None]:
    """A Ray cluster of our own, for as long as the context lasts; the present one if there is one."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a throwaway cluster needs no token in the home folder
    import ray

    if ray.is_initialized():
        yield
        return
    try:
        ray.init(
            address="local",
            num_cpus=max(2, os.cpu_count() or 2),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=OBJECT_STORE_BYTES,
        )
        yield
    finally:
        ray.shutdown()


def _failure(console: Console, what: str, code: int) -> typer.Exit:
    console.print("[red]error:[/] ", end="")
    console.print(what, markup=False)
    return typer.Exit(code)


def _in_words(error: BaseException) -> str:
    """One line about an error: of a remote error's text, which holds a traceback, what it says in the end."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_in_words(each) for each in error.exceptions)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if len(lines) > 1 and len(lines[-1]) <= LONGEST_LINE:
        return lines[-1]
    return f"{type(error).__name__}: {lines[0]}"


POLICY_INTRODUCTION = """\
A small policy learns to say eight digits in reverse order; by chance one digit in ten is right. \
One trainer and two rollout engines, each a process of its own. The engines never stop generating; \
after each training step both get the new weights, and each confirms them by a digest.
"""

LANGUAGE_INTRODUCTION = """\
{name}: the trainer takes AdamW steps on two short texts, while two engines answer questions. \
The engines start with random weights: what they know, they know from updates. After each update both \
engines and the trainer answer greedily, and must agree token for token. The reward is minus the loss.
"""

STALE_LEGEND = "[dim]stale: versions that the oldest rollout was behind when trained on · [/]"

LEGEND = """\
[dim]update: time of a weight update · pause: how long it held generation back · \
stall: longest stall of the event loop so far[/]
"""


class _Progress:
    """Shows a demo's progress: what is under way on one line that changes, and a row of figures now and then."""

    def __init__(self, console: Console, *, language_model: bool) -> None:
        self._console = console
        self._language_model = language_model
        self._status = Status("", console=console)

    def __enter__(self) -> None:
        if self._console.is_terminal:
            self._status.start()

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def stage(self, what: str) -> None:
        if self._console.is_terminal:
            self._status.update(f"{what} …")
        else:
            self._console.print(f"{what} …")

    def step(self, step: Step) -> None:
        if self._console.is_terminal:
            self._status.update(f"step {step.step} of {step.steps}, reward {step.reward:.3f}")
        if step.step == 1:
            self._console.print(LEGEND if self._language_model else f"{STALE_LEGEND}{LEGEND}")
            self._console.print(
                self._row("step", "version", "reward", "stale", "update", "pause", "stall"), style="bold"
            )
        every = max(1, step.steps // ROWS)
        if step.step in (1, step.steps) or step.step % every == 0 or not step.digests_agree:
            self._console.print(self._figures(step), markup=False)

    def _figures(self, step: Step) -> str:
        row = self._row(
            f"{step.step}",
            f"{step.version}",
            f"{step.reward:.3f}" if self._language_model else f"{step.reward:.3f} {_bar(step.reward)}",
            f"{step.staleness}",
            _milliseconds(step.update_ms),
            _milliseconds(step.pause_ms),
            _milliseconds(step.stall_ms),
        )
        sample = f"{step.prompt} → {step.answer}"
        row += f"\n      {sample}" if self._language_model else f"  {sample}"
        row += "" if step.digests_agree else "\n      DIGESTS DISAGREE"
        return row if step.greedy_equal is not False else f"{row}\n      TOKENS DIFFER"

    def _row(self, step: str, version: str, reward: str, stale: str, *times: str) -> str:
        staleness = "" if self._language_model else f" {stale:>5}"
        width = 7 if self._language_model else 14
        return f"{step:>4} {version:>7}  {reward:<{width}}{staleness}" + "".join(f" {each:>7}" for each in times)


def _bar(share: float) -> str:
    full = round(max(0.0, min(1.0, share)) * 8)
    return "█" * full + "░" * (8 - full)


def _milliseconds(count: float) -> str:
    return f"{count:.0f} ms" if count < 10_000 else f"{count / 1e3:.1f} s"


def _show_summary(console: Console, summary: Summary) -> None:
    table = Table(title="\nasyncsync demo", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("reward", f"{summary.reward_first:.3f} → {summary.reward_last:.3f}")
    table.add_row("weight updates", f"{summary.updates}, of {format_bytes(summary.update_bytes)} to each engine")
    table.add_row("digests", _verdict(summary.digests_agree, "agree at every update", "DISAGREE"))
    if summary.greedy_equal is not None:
        greedy = _verdict(summary.greedy_equal, "equal in trainer and engines after every update", "DIFFERENT")
        table.add_row("greedy tokens", greedy)
    table.add_row("update time", f"{summary.update_ms_median:.1f} ms (median; draining included)")
    table.add_row("pause time", f"{summary.pause_ms_median:.1f} ms (median)")
    table.add_row("event loop", f"longest stall {summary.loop_stall_ms:.1f} ms")
    if summary.staleness_max is not None:
        table.add_row("staleness", f"{summary.staleness_max} at most (versions behind, when trained on)")
    table.add_row("generated", f"{summary.generated:,} sequences")
    table.add_row("wall time", f"{summary.seconds:.1f} s, start of Ray included")
    console.print(table)


def _verdict(good: bool, yes: str, no: str) -> str:
    return f"[green]{yes}[/]" if good else f"[red]{no}[/]"
