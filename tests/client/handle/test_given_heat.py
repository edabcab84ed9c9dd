"""How callers say how much records are to be used: a trace, its file or numbers; whatever is none of them is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramstore.core.heat import unpack_heat
from paramstore.core.key import KeySpace
from paramstore.core.schema import Schema
from paramstore.core.trace import Trace, TraceEvent, TraceEventKind, TraceHeader
from paramstore.errors import ConfigError, UnknownKey
from paramstore_client.handle.given_heat import packed_heat, read_trace

KEYS = KeySpace.of(2, 4)
HEADER = TraceHeader("t", Schema.param({"w": ((4,), "float32")}).describe(), [0, 1], 4, "by hand")
TRACE = Trace(HEADER, tuple(TraceEvent(TraceEventKind.ACQUIRE, 1, experts) for experts in ((2,), (2, 3))))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "a.trace").write_bytes(TRACE.pack())
    return tmp_path / "a.trace"


def test_a_trace_its_file_and_numbers_say_the_same(file: Path) -> None:
    packed = {packed_heat(heat, KEYS, namespace="moe") for heat in (TRACE, file, str(file), {(1, 2): 2, (1, 3): 1})}
    assert len(packed) == 1
    assert list(unpack_heat(packed.pop(), KEYS).heats) == [(1, 2), (1, 3)]


def test_no_heat_is_sent_as_none() -> None:
    assert packed_heat(None, KEYS, namespace="moe") == b""


@pytest.mark.parametrize("cut", [0, 1, 30, -1])
def test_a_damaged_file_is_refused_by_name(file: Path, cut: int) -> None:
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ConfigError, match=r"heat '.*a\.trace': this is no trace: "):
        read_trace(file)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"heat '.*none': .*No such file"):
        packed_heat(tmp_path / "none", KEYS, namespace="moe")


def test_a_trace_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"namespace 'moe' has 4 in 3"):
        packed_heat(TRACE, KeySpace.of(3, 4), namespace="moe")


@pytest.mark.parametrize("heat", [5, [(0, 0)], b"trace", {"a": 1}, {0: 1}])
def test_what_is_no_heat_is_refused(heat: object) -> None:
    with pytest.raises((ConfigError, UnknownKey)):
        packed_heat(heat, KEYS, namespace="moe")  # type: ignore[arg-type]
