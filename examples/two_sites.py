"""Two sites that share a folder, and nothing else: one trains and publishes, the other generates with what it reads.

Run it with ``python examples/two_sites.py``. Both sites are in this one process, without a cluster.
"""

import asyncio
import tempfile

import torch
from torch import nn

import asyncsync

STEPS = 3


def build_policy() -> nn.Module:
    """The policy: any module will do."""
    return nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256))


async def train(folder: str, published: asyncio.Event) -> None:
    """The first site: a trainer, an engine beside it, and each version published in the folder, too."""
    policy, engine = build_policy(), asyncsync.ModuleEngine(build_policy())
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    async with asyncsync.WeightSynchronizer(policy, [engine], folder=folder) as synchronizer:
        for _ in range(STEPS):
            loss = policy(torch.randn(8, 256)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(await synchronizer.update_weights())
            published.set()


async def generate(folder: str, published: asyncio.Event) -> None:
    """The second site: engines of its own, and the folder in the place of a trainer."""
    engines = [asyncsync.ModuleEngine(build_policy()) for _ in range(2)]
    weights = None  # those that were read last: tensors over the files themselves, read as they are used
    async with asyncsync.WeightSynchronizer(lambda: weights.tensors, engines) as synchronizer:
        while weights is None or weights.version < STEPS:
            await published.wait()  # at two sites: look again after a while
            published.clear()
            weights = await asyncio.to_thread(asyncsync.read_weights, folder)
            update = await synchronizer.update_weights()
            assert update.digest == weights.digest  # that which the first site's engines have confirmed
            async with engines[0].generating():
                answer = engines[0].module(torch.randn(256))
            print(f"the other site serves version {weights.version}: {answer.norm().item():.3f}")


async def main() -> None:
    """Three steps."""
    with tempfile.TemporaryDirectory() as folder:
        published = asyncio.Event()
        await asyncio.gather(train(folder, published), generate(folder, published))


if __name__ == "__main__":
    asyncio.run(main())
