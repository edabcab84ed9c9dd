"""A table of packed roots combines to what a commit note holds, patched or made anew."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paramstore.core.key import ExpertKey
from paramstore.storage.catalog.roots import RootTable
from paramstore.storage.format.structures import combine_roots

KEYS = st.tuples(st.integers(0, 300), st.integers(0, 300))
ROOTS = st.dictionaries(KEYS, st.integers(0, (1 << 64) - 1), max_size=20)


@given(roots=ROOTS)
def test_a_table_combines_as_the_note_does_whatever_order_the_keys_come_in(roots: dict[ExpertKey, int]) -> None:
    assert RootTable(roots.items()).combined() == combine_roots(roots.items())
    assert RootTable(reversed(roots.items())).combined() == combine_roots(roots.items())


@given(roots=ROOTS, data=st.data())
def test_a_patched_table_is_the_table_of_the_changed_roots_and_the_old_one_stays(
    roots: dict[ExpertKey, int], data: st.DataObject
) -> None:
    changed = {key: data.draw(st.integers(0, (1 << 64) - 1)) for key in roots if data.draw(st.booleans())}
    table = RootTable(roots.items())
    assert table.patched(changed.items()).combined() == combine_roots((roots | changed).items())
    assert table.combined() == combine_roots(roots.items())


def test_a_table_knows_which_keys_it_has() -> None:
    table = RootTable([((0, 1), 7), ((2, 0), 8)])
    assert table.has([(2, 0)])
    assert table.has([])
    assert not table.has([(2, 0), (1, 1)])
