"""Weight updates: asyncsync against what others offer, in one interleaved run.

``python -m benchmarks.peers`` brings the same weights from this process to two engines, processes of this machine:

* ``asyncsync``, over each of its transports, with staged engines and with engines that are overwritten in place;
* ``ray.put, packed``: every tensor packed into one uint8 array, put from a thread, and unpacked by the engines;
  ``ray.put of a state dict``, from the event loop;
* ``seed's loop``: what RL frameworks ship (:mod:`benchmarks.seed_loop`);
* ``ray.util.collective``: a broadcast for each tensor; ``Ray direct transport``, over NIXL and over gloo;
* ``torchrl``: its weight sync over Ray; ``torchstore``.

Beside them, bare, what moves as many bytes in one piece that belongs to no tensor: ``memcpy``, one copy in this
process; ``gloo broadcast, flat``, from barrier to barrier; ``ray.put, flat``.

Weights change before every run, and after it the engines' bytes are compared: who leaves other bytes has no figures.
Each runs once a round, in an order that changes; medians, after the first update and two rounds to warm up. They run in
heats of a few, or of as many as there is memory for, each with ``asyncsync shared, staged``, which the ratios are to;
who keeps the machine busy between his updates has a heat of his own.
*Stall* is the longest that a 1 ms ticker in this process's event loop came late, in rounds of their own. *First* is the
first update, connecting included. What is not installed, or does not run, is named, and counts as beaten by nobody.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import layouts
from benchmarks.peers.entries import ENGINES, FLOOR, REFERENCE, REFERENCE_BETWEEN_NODES, Entry, all_entries
from benchmarks.peers.measuring import Findings, Row, measure
from benchmarks.running import machine, memory_available, on_a_private_cluster, write_rows
from benchmarks.sync_latency import rounds

CASES = ("smollm2", "2000x4KB", "1 GB")
QUICK_CASES = ("2000x4KB", "16 MB")


async def measure_all(
    cases: Sequence[str], entries: Sequence[Entry], *, quick: bool, say: Console, file: Path | None, reference: str
) -> Findings:
    """Measure every layout; the rows so far are in the file after each."""
    torch.set_num_threads(1)
    logging.getLogger("asyncsync").setLevel(logging.WARNING)  # Monarch has all that is logged printed
    gc.freeze()  # what was imported is not to be looked through again at every collection
    findings = Findings()
    for case in cases:
        layout = layouts.all_layouts()[case]
        found = await measure(
            layout,
            entries,
            rounds=rounds(layout, quick=quick),
            memory=memory_available(),
            say=say.print,
            reference=reference,
        )
        findings.rows += found.rows
        findings.missing |= found.missing
        write_rows([asdict(row) for row in findings.rows], file)
    return findings


def show(findings: Findings, entries: Sequence[Entry], reference: str = REFERENCE) -> None:
    """Print a table a layout, what everyone takes against the library, and who is missing."""
    console = Console(width=120)
    kinds = {entry.name: entry.kind for entry in entries}
    for case in dict.fromkeys(row.layout for row in findings.rows):
        rows = [row for row in findings.rows if row.layout == case]
        table = Table(title=f"{case}: one update of two engines")
        for column in ("", "ms", f"/ {reference}", "stall, ms", "first, s"):
            table.add_column(column, justify="right" if column else "left")
        for row in sorted(rows, key=lambda row: row.seconds):
            style = {"ours": "bold", "bare": "dim", "peer": ""}[kinds[row.contender]]
            figures = (f"{row.seconds * 1e3:.4g}", f"{row.seconds / row.ours_s:.2f}", f"{row.stall_ms:.1f}")
            table.add_row(row.contender, *figures, f"{row.first_s:.2f}", style=style)
        console.print(table)
    for line in summary(findings.rows, kinds, reference):
        console.print(line, highlight=False)
    for (name, case), why in findings.missing.items():
        console.print(f"not measured: {name}, {case}: {why}", highlight=False, markup=False)
    loads = " ".join(f"{load:.1f}" for load in os.getloadavg())
    console.print(f"{machine()}; load average {loads}", highlight=False)


def summary(rows: Sequence[Row], kinds: Mapping[str, str], reference: str) -> list[str]:
    """What each other way that was measured takes against the library, on each layout; who is faster is said so."""
    others = sorted({row.contender for row in rows} - {name for name, kind in kinds.items() if kind == "ours"})
    lines = []
    for name in sorted(others, key=lambda name: kinds[name]):
        each = []
        for row in rows:
            if row.contender == name:
                ratio = row.seconds / row.ours_s
                faster = ratio <= 1 and kinds[name] == "peer"
                each.append(f"{row.layout} {ratio:.2f}{' (FASTER)' if faster else ''}")
        lines.append(f"{kinds[name]}: {name} / {reference}: {', '.join(each)}")
    return lines


def main() -> None:
    """The command."""
    entries = all_entries()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small layouts and fewer rounds: about two minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    parser.add_argument("--case", action="append", choices=tuple(layouts.all_layouts()), help="only this layout")
    parser.add_argument("--only", action="append", metavar="TEXT", help="only contenders with this in their names")
    parser.add_argument(
        "--nodes",
        action="store_true",
        help="three Ray nodes of this machine, an engine on each of two; who needs shared memory or a store stays out",
    )
    options = parser.parse_args()
    reference = REFERENCE_BETWEEN_NODES if options.nodes else REFERENCE
    if options.nodes:
        entries = [entry for entry in entries if entry.is_far]
    if options.only:
        entries = [
            entry
            for entry in entries
            if entry.name in (reference, FLOOR) or any(text in entry.name for text in options.only)
        ]
    cases = options.case or (QUICK_CASES if options.quick else CASES)
    largest = max(layouts.all_layouts()[case].nbytes for case in cases)
    findings = on_a_private_cluster(
        lambda: measure_all(
            cases, entries, quick=options.quick, say=Console(stderr=True), file=options.json, reference=reference
        ),
        object_store_memory=max(layouts.GB, 3 * largest),
        nodes=ENGINES + 1 if options.nodes else 1,
    )
    show(findings, entries, reference)
