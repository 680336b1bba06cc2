"""A rollout loop that goes on when an engine dies: the others get each update, and another one takes the place.

Run it with ``python examples/surviving_loop.py``. It kills one of its own engines after the third step.
"""

import asyncio
import contextlib
import logging
import random

import ray
import torch
from rollout_loop import Engine, Trainer

import asyncsync

ENGINES = 3
log = logging.getLogger("loop")

GONE = (ray.exceptions.RayActorError, asyncsync.EngineError, asyncsync.NotReadyError, asyncsync.MembershipError)
"""What a rollout may meet when its engine dies: before an update has noticed, while it does, and after."""


async def rollout(synchronizer: asyncsync.WeightSynchronizer, rollouts: asyncio.Queue) -> None:
    """Generate for ever, on whichever engine holds the published weights."""
    while True:
        engine = random.choice(synchronizer.ready_engines)
        with contextlib.suppress(*GONE):
            async with synchronizer.generation(engine) as version:  # ends if the engine turns out not to answer
                answer = await engine.generate.remote(torch.randn(256))
            await rollouts.put((version, answer))
        await asyncio.sleep(0)


async def update(synchronizer: asyncsync.WeightSynchronizer) -> None:
    """Bring the weights to all engines; those that failed are replaced."""
    try:
        print(await synchronizer.update_weights())
    except asyncsync.WeightUpdateError as error:
        log.exception("an update failed")  # with its notes: what to do next
        if error.update is None:
            raise  # nobody got it
        print(error.update)
        for outcome in error.outcomes:
            if outcome.state is asyncsync.EngineState.LOST:  # one that is tainted is repaired by the next update
                await synchronizer.remove_engine(outcome.engine)
                await synchronizer.add_engine(Engine.remote())  # gets the version from an engine that serves it
                print(f"{outcome.engine} was replaced: {[str(engine) for engine in synchronizer.ready_engines]}")


async def main() -> None:
    """Six steps."""
    trainer, engines = Trainer.remote(), [Engine.remote() for _ in range(ENGINES)]
    rollouts: asyncio.Queue = asyncio.Queue(maxsize=16)
    async with asyncsync.WeightSynchronizer(trainer, engines) as synchronizer:
        await update(synchronizer)
        workers = [asyncio.create_task(rollout(synchronizer, rollouts)) for _ in range(4)]
        for step in range(6):
            batch = [await rollouts.get() for _ in range(8)]
            await trainer.train_step.remote([answer for _, answer in batch])
            if step == 3:
                ray.kill(engines[1])
            await update(synchronizer)
        for worker in workers:
            worker.cancel()
        await asyncio.wait(workers)
        assert len(synchronizer.ready_engines) == ENGINES
        print(f"{synchronizer.statistics().updates} versions, and {ENGINES} engines in the end")


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    asyncio.run(main())
