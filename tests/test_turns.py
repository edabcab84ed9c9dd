import os
import threading

import pytest

from paramstore.turns import Turns

WAIT_S = 10.0


@pytest.mark.parametrize("at_once", [1, 2])
def test_so_many_have_a_turn_at_once_and_no_more(at_once: int) -> None:
    turns, lock, inside, seen = Turns(at_once), threading.Lock(), [0], list[int]()
    all_inside = threading.Barrier(at_once)  # broken, and the test fails, if fewer than `at_once` ever get in together
    all_started = threading.Barrier(4 * at_once)

    def work() -> None:
        all_started.wait(WAIT_S)
        with turns:
            with lock:
                inside[0] += 1
                seen.append(inside[0])
            all_inside.wait(WAIT_S)
            for _ in range(200):  # a turn that nobody guards is taken by another thread here
                os.sched_yield()
            with lock:
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4 * at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(seen) == 4 * at_once
    assert max(seen) == at_once


def test_a_turn_ends_whatever_happens_in_it() -> None:
    turns = Turns(1)
    for _ in range(2):
        with pytest.raises(OSError, match="broken"), turns:
            raise OSError("broken")
    with turns:
        pass
