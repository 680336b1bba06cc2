"""The command: see :func:`benchmarks.peers.command.main`."""

from __future__ import annotations

import os

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a private cluster on this machine; read when Ray is imported

from benchmarks.peers.command import main

main()
