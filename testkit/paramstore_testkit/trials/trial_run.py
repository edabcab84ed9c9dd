"""Runs a store's trial from its seed: rounds of random calls, each of which ends in a crash."""

from __future__ import annotations

import asyncio

import torch

from paramstore.errors import ParamStoreError
from paramstore_testkit.trials.store_trial import StoreTrial


async def live(trial: StoreTrial, *, rounds: int, acts: int) -> None:
    await trial.begin()
    for number in range(rounds):
        for _ in range(acts):
            await trial.act()
            if trial.random.random() < 0.3:
                await asyncio.sleep(0)
        if number % 2:
            await trial.settle()
            while not trial.store.transfers.runner.is_idle:  # a cancelled prefetch may still land
                await asyncio.sleep(0)
            trial.check_nothing_leaked()
            if trial.writer.namespace.prepared_step is None:
                await trial.check_all()
        await trial.crash()


def run_seed(
    seed: int, *, updates: str, rounds: int = 4, acts: int = 40, timeout_s: float = 60.0, kind: type[StoreTrial] = StoreTrial
) -> StoreTrial:
    """Runs the trial of `seed`; gives it when all checks have passed. Whatever it raises tells the seed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # records have some hundred bytes: more threads would only wait for each other
    trial = kind(seed, updates=updates)
    try:
        asyncio.run(asyncio.wait_for(live(trial, rounds=rounds, acts=acts), timeout_s))
    except ParamStoreError as error:
        raise AssertionError(f"seed {seed}: {error!r}") from error
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    finally:
        torch.set_num_threads(threads)
    return trial
