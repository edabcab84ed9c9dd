"""Faults are planted in the code that runs, one at a time, and gone afterwards."""

from __future__ import annotations

import ast

import torch

from paramstore_client.device import copier, slots
from paramstore_client.device.copier import CudaCopier, HostCopier
from paramstore_client.device.slots import DeviceSlots
from paramstore_testkit.streams.faults import FAULTS, _calls, waits
from paramstore_testkit.training.small_tier import KEYS, make_namespace

WAITING = """
class Copier:
    def copy(self, mark):
        assert mark.is_reached()
        self.stream.wait_stream(other)
        return [each.wait_on_host() for each in marks]

def arrived(ticket):
    return ticket.host.wait()
"""


def test_waits_are_found_in_methods_and_functions_but_not_what_an_assert_asks_or_a_ticket_of_the_host() -> None:
    found = [(name, ast.unparse(call)) for name, call in _calls(ast.parse(WAITING))]
    assert found == [("Copier.copy", "self.stream.wait_stream(other)"), ("Copier.copy", "each.wait_on_host()")]


def test_every_layer_of_the_device_code_has_waits_to_take_away() -> None:
    assert {name.partition(".")[0] for name in waits()} == {"copier", "copies", "slots"}


def test_a_wait_is_taken_away_inside_the_block_alone() -> None:
    asked: list[str] = []

    class Mark(copier.Reached):
        def wait_on_stream(self) -> None:
            asked.append("wait")

    class Late(HostCopier):
        def copy(self, fields: object, *, after: object) -> Mark:
            return Mark()

    ns = make_namespace()
    made = DeviceSlots(ns.schema.part("param"), 1, device=torch.device("cpu"), copier=Late())
    copy = made.place(KEYS[0], ns.values(KEYS[0]), ns.identity(KEYS[0]), checked_at=0)
    with FAULTS["slots.DeviceSlots.begin_use: copy.ready.wait_on_stream()"]():
        made.begin_use([copy])
    assert asked == []
    made.begin_use([copy])
    assert asked == ["wait"]


def test_every_fault_leaves_the_code_as_it_was() -> None:
    functions = [
        function for owner in (DeviceSlots, CudaCopier, copier._EventMark, slots.DeviceCopy)
        for function in vars(owner).values() if hasattr(function, "__code__")
    ]  # fmt: skip
    codes = [function.__code__ for function in functions]
    for plant in FAULTS.values():
        with plant():
            pass
    assert [function.__code__ for function in functions] == codes
    assert DeviceSlots.__init__ in functions
