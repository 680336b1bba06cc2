"""A fully-async rollout loop: two engines generate all the time, a trainer steps, weights follow.

Run it with ``python examples/rollout_loop.py``. It needs a cluster of one machine, which Ray starts.
"""

import asyncio

import ray
import torch
from torch import nn

import asyncsync


def build_policy() -> nn.Module:
    """The policy: any module will do."""
    return nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256))


@asyncsync.remote(num_cpus=0)  # ray.remote, and a group for control calls: they never wait for generate()
class Engine(asyncsync.ModuleEngine):
    """Serves the policy."""

    def __init__(self) -> None:
        super().__init__(build_policy())

    async def generate(self, prompt: torch.Tensor) -> torch.Tensor:
        """One rollout."""
        async with self.generating():  # the weights stay as they are until this is left
            with torch.no_grad():
                return self.module(prompt)


@asyncsync.remote(num_cpus=0)
class Trainer(asyncsync.TrainerRank):
    """Trains the policy."""

    def __init__(self) -> None:
        self.policy = build_policy()
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.1)
        super().__init__(self.policy)

    def train_step(self, rollouts: list[torch.Tensor]) -> None:
        """Make the policy's answers smaller."""
        loss = self.policy(torch.stack(rollouts)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


async def main() -> None:
    """Five steps."""
    trainer, engines = Trainer.remote(), [Engine.remote() for _ in range(2)]
    rollouts: asyncio.Queue[tuple[int, torch.Tensor]] = asyncio.Queue(maxsize=16)

    async with asyncsync.WeightSynchronizer(trainer, engines) as synchronizer:
        print(await synchronizer.update_weights())  # connects, and brings the first weights

        async def rollout(engine) -> None:
            while True:
                async with synchronizer.generation(engine) as version:  # shared; read at dispatch
                    answer = await engine.generate.remote(torch.randn(256))
                await rollouts.put((version, answer))

        workers = [asyncio.create_task(rollout(engine)) for engine in engines]
        for _ in range(5):
            batch = [await rollouts.get() for _ in range(8)]
            await trainer.train_step.remote([answer for _, answer in batch])
            update = await synchronizer.update_weights()  # exclusive, coalesced, bounded
            print(update, "trained on versions", sorted({version for version, _ in batch}))
        for worker in workers:
            worker.cancel()


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    asyncio.run(main())
