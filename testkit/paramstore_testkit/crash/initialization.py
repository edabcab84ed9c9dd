"""Gives a life's namespace its first values, with drafts: put, save, stop, go on. Models what each draft holds.

Drafts are numbered from 1 on; the model of draft n is the life's step -n, and its `extra` says n.
"""

from __future__ import annotations

from paramstore.core.key import ExpertKey
from paramstore.engine.store import Store
from paramstore_testkit.crash.life import KEYS, NAME, SCHEMA, Life
from paramstore_testkit.oracles.images import initial_of

SAVED_AFTER = (1, 2)
"""Numbers of values after which an attempt saves."""


def draft_extra(number: int) -> bytes:
    return f"draft {number}".encode()


def draft_number(extra: bytes) -> int:
    return int(extra.split()[1])


async def begin(life: Life, *, with_drafts: bool = False) -> None:
    """Begins a life: makes a new namespace with initial values, committed. with_drafts: in two attempts, with drafts."""
    await life.start()
    await initialize(life, with_drafts=with_drafts)
    await life.commit()


async def initialize(life: Life, *, with_drafts: bool) -> None:
    """Initializes the namespace, whatever was there before; on return every key has its value. with_drafts: some values are
    saved, the daemon ends and comes up again, and some more are saved."""
    await _attempt(life, saved_after=SAVED_AFTER if with_drafts else (), stops=with_drafts)
    if with_drafts:
        await life.machine.kill()
        life.store = life.machine.start()
        await _attempt(life, saved_after=SAVED_AFTER, stops=False)
    await life.store.initializer.end(life.view)


async def _attempt(life: Life, *, saved_after: tuple[int, ...], stops: bool) -> None:
    """Puts missing values, and saves after the given numbers of them. stops: ends with one value more than were saved first."""
    store = life.store
    schema = life.model.schema.describe()
    life.view = await store.admission.create(NAME, schema, layers=[0], experts=len(KEYS), host_bytes=None)
    life.note("created")
    begun = await store.initializer.begin(life.view, is_resumed=True)
    _adopt(life, begun)
    count = 0
    for key in KEYS:
        if key in life.model.working:
            continue
        await _put(life, store, key)
        count += 1
        if stops and count > saved_after[0]:
            return
        if count in saved_after:
            await _save(life)


def _adopt(life: Life, begun: dict[str, object]) -> None:
    """Takes over what the daemon found, which must be one of the drafts, as the model has it."""
    present, extra = begun["present"], begun["extra"]
    assert isinstance(present, bytes)
    bits = int.from_bytes(present, "little")
    found = {key for number, key in enumerate(KEYS) if bits >> number & 1}
    life.model.working = {}
    if extra is not None:
        assert isinstance(extra, bytes)
        life.model.working = life.model.steps[-draft_number(extra)]
    assert found == set(life.model.working), f"{sorted(found)} have values, the draft has {sorted(life.model.working)}"


async def _put(life: Life, store: Store, key: ExpertKey) -> None:
    values = life.model.next_values()
    life.model.initialize({key: values})
    await store.initializer.put(life.view, key, initial_of(SCHEMA, values))


async def _save(life: Life) -> None:
    number = 1 - min((step for step in life.model.steps if step < 0), default=0)
    life.model.steps[-number] = life.model.working
    life.note("drafting", number)
    await life.store.committer.save_draft(life.view, draft_extra(number))
    life.note("drafted", number)
