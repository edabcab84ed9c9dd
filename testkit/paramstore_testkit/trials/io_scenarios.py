"""The scenarios of the I/O error sweep: what may be under way in a small store when something fails.

`live` runs one of them in a `Trial`, and checks everything that must hold afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from paramstore.errors import ParamStoreError, VolumeError
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_store import first_values
from paramstore_testkit.trials.io_faults import Script
from paramstore_testkit.trials.io_trial import KEYS, NAMES, Images, Life, Trial

Scenario = Callable[[Trial], Coroutine[Any, Any, None]]


class StartingPoint(Protocol):
    """Disks with a store that nobody has open."""

    def machine(self, seed: int, script: Script) -> Machine: ...


# --- what may be under way when something fails


async def format_store(trial: Trial) -> None:
    """Makes a new store, its first namespace and its first step."""
    await trial.open_store()
    await trial.create_new()


async def create_namespace(trial: Trial) -> None:
    """Makes a third namespace, for which the volumes grow."""
    await trial.create_new()


async def open_all(trial: Trial) -> None:
    """Opens the store after a crash, its writers and a reader, and reads every record."""
    trial.lives = {name: Life(1, {0: 0, 1: 1}) for name in NAMES}
    await trial.open_store()
    for name in NAMES:
        await trial.check_records(name, await trial.open_writer(name), 1)


async def commit_steps(trial: Trial) -> None:
    """Commits two steps, one after the other."""
    for _ in range(2):
        await trial.train("moe")
        await trial.commit("moe")


async def commit_beside_others(trial: Trial) -> None:
    """Commits beside another namespace's apply and commit and a reader, all at once."""
    await trial.train("moe")
    calls = (trial.commit("moe"), train_and_commit(trial, "other"), trial.check_records("moe", trial.reader, 1))
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for outcome in sorted(refused, key=lambda error: isinstance(error, ParamStoreError)):  # errors that are no refusal come first
        raise outcome


async def train_and_commit(trial: Trial, name: str) -> None:
    await trial.train(name)
    await trial.commit(name)


async def evict_all(trial: Trial) -> None:
    """Evicts dirty records from memory, and loads them again."""
    await trial.train("moe")
    await trial.ask("evict moe", trial.store.evict(trial.writers["moe"], None, None))
    await trial.check_params("moe", trial.writers["moe"], trial.lives["moe"].applies)


async def load_all(trial: Trial) -> None:
    """Leases and reads every record, one key after the other: a failure is told to who asked for it, and to nobody else."""
    view, store = trial.writers["moe"], trial.store
    is_lasting = bool(trial.script.lasting_sites)
    refused: ParamStoreError | None = None
    for key, expected in zip(KEYS, trial.first_params(1), strict=True):
        try:
            assert await trial.ask(f"lease of {key}", first_values(store, view, [key])) == [expected]
        except ParamStoreError as error:
            assert refused is None or is_lasting, "a fault that is over reached a second key"
            refused = error
            if not is_lasting:
                assert await trial.ask(f"lease of {key}", first_values(store, view, [key])) == [expected]
    if refused is not None:
        raise refused
    request = store.access.prefetch(view, KEYS, "optim", None)
    await trial.ask("prefetch", store.access.wait_prefetch(request))
    await trial.check_records("moe", view, 1)


async def roll_back_and_commit(trial: Trial) -> None:
    """Drops uncommitted records that are on the volume, and makes the step again."""
    await trial.train("moe")
    await trial.ask("write back moe", trial.store.write_back(trial.writers["moe"], None))
    await trial.roll_back("moe")
    await trial.train("moe")
    await trial.commit("moe")


async def keep_a_step(trial: Trial) -> None:
    """Makes a snapshot and a step after it, then drops the snapshot."""
    store, writer = trial.store, trial.writers["moe"]
    await trial.ask("snapshot of moe", store.admission.snapshot(writer, 1))
    await train_and_commit(trial, "moe")
    await trial.ask("end of the snapshot of moe", store.admission.drop_snapshot(writer, 1))


async def scrub_all(trial: Trial) -> None:
    """Reads every record of every step where it lies: a failure is a finding that names its record; the scrub goes on."""
    scrubber = trial.machine.service.scrubber
    result: Any = await trial.ask("scrub", scrubber.wait(scrubber.start(None, None, None)))
    assert result["records"] == result["records_total"]
    for finding in (*result["copy_findings"], *result["findings"]):
        what = finding.get("key", finding.get("kind"))
        error = VolumeError(f"{finding['namespace']} {what}, volume {finding['volume']}: {finding['reason']}")
        trial.check_message("scrub", error)
        trial.refusals.append(("scrub", error))
    if trial.script.strikes and not trial.script.lasting_sites:
        assert result["found"] <= 1, "a fault that is over was found a second time"
    if trial.refusals:
        raise trial.refusals[0][1]


SCENARIOS: dict[str, Scenario] = {
    "format": format_store, "create": create_namespace, "open": open_all, "commit": commit_steps,
    "commit beside others": commit_beside_others, "evict": evict_all,
    "load": load_all, "rollback": roll_back_and_commit, "snapshot": keep_a_step, "scrub": scrub_all,
}  # fmt: skip
STARTS_THE_STORE = ("format", "open")
"""Scenarios in which the start itself may fail."""


async def live(name: str, disks: StartingPoint, script: Script, images: Images, *, seed: int, variant: int) -> str:
    """Runs one trial of a scenario; gives the fate of the caller: `unharmed`, `repaired` or `refused: error class`.

    seed: equal ones make the calls of the scenario in equal order. variant: chooses the way on, and what a crash keeps.
    """
    trial = Trial(disks.machine(seed, script), script, images)
    if name not in STARTS_THE_STORE:
        await trial.begin()
    script.arm()
    outcome = "repaired" if script.strikes else "unharmed"
    try:
        await SCENARIOS[name](trial)
    except ParamStoreError as error:
        outcome = f"refused: {type(error).__name__}"
    if not script.strikes:
        script.disarm()  # so that only the scenario's calls are counted
    else:
        assert script.fired, f"{script.strikes} struck nothing: {dict(script.calls)}"
        assert trial.refusals or outcome == "repaired"
    if name not in STARTS_THE_STORE:
        await trial.others_go_on()
    if not script.lasting_sites and hasattr(trial, "store"):
        await trial.find_way_on(rolls_back=variant % 2 == 0)
        outcome += ", stopped" if trial.is_stopped else ""
    assert not script.reused, script.reused
    await trial.crash_and_check(keeps_random_writes=variant % 3 == 0, goes_on=variant % 4 == 0)
    assert trial.was_fenced or not trial.was_told_of_a_flush or name in STARTS_THE_STORE, "a flush failed and fenced no volume"
    return outcome
