"""An engine that fetches from torchstore: an actor of Monarch's, the one kind of process that torchstore knows."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
import torchstore
from monarch.actor import Actor, endpoint

from benchmarks import layouts
from benchmarks.layouts import Layout


class TorchstoreEngine(Actor):
    """Holds the weights of a layout."""

    def __init__(self, layout: Layout) -> None:
        torch.set_num_threads(1)
        self.module = layouts.make_module(layout)

    @endpoint
    async def fetch(self, key: str) -> None:
        """Fetch the weights to where they lie."""
        await torchstore.get_state_dict(key=key, user_state_dict=self.module.state_dict())

    @endpoint
    async def fingerprint(self) -> str:
        """Digest of the weights."""
        return layouts.fingerprint(self.module.parameters())
