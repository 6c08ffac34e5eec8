"""The pool: order between launches, counts known late, sleeping and waking, forks, and what it refuses."""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from native_running import NestedArgs, ProbeArgs, SetCountArgs, probe_library

from lean_engine.errors import LaunchError
from lean_engine.runtime.cpu.native.launches import NativeLaunch, address
from lean_engine.runtime.cpu.native.library import Native
from lean_engine.runtime.cpu.native.pool import LaunchList, Pool

NUM_VALUES = 24


@pytest.fixture(params=[1, 2, 3, 8], ids=lambda n: f"{n}-threads")
def native(request: pytest.FixtureRequest) -> Iterator[Native]:
    native = Native(probe_library(), request.param)
    yield native
    native.close()


class Probes:
    """A list in which every launch adds 1 to each value and counts those that it does not find as the last one left."""

    def __init__(self, counts: list[int], spin: int = 0, is_dynamic: bool = False) -> None:
        self.values = np.zeros(NUM_VALUES, np.int64)
        self.wrong = np.zeros(1, np.int64)
        self.counts = np.array(counts, np.int64)
        self.spin, self.is_dynamic = spin, is_dynamic
        self.num_done = 0

    def launches(self) -> list[NativeLaunch]:
        """For one run; the values of the next one go on from where these leave them."""
        launches = []
        for i, count in enumerate(self.counts.tolist()):
            args = ProbeArgs(
                address(self.values), address(self.wrong), NUM_VALUES, self.num_done, self.spin,
                address(self.counts) + 8 * i,
            )  # fmt: skip
            launches.append(NativeLaunch("probe", args, count, "probe_count" if self.is_dynamic else None))
            self.num_done += count > 0
        return launches

    def is_right(self) -> bool:
        return self.wrong[0] == 0 and bool((self.values == self.num_done).all())


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "count_of"])
def test_every_launch_sees_all_that_the_one_before_it_wrote(native: Native, is_dynamic: bool) -> None:
    random_counts = random.Random(4)
    probes = Probes([random_counts.choice((0, 1, 1, 2, 3, 5, 24)) for _ in range(300)], is_dynamic=is_dynamic)
    for _ in range(20):
        native.run(probes.launches())
    assert probes.is_right()


def test_thousands_of_short_runs_with_pauses_in_which_threads_fall_asleep(native: Native) -> None:
    probes = Probes([2, 0, 8, 1, 3])
    for i in range(2000):
        native.run(probes.launches())
        if i % 100 == 0:
            time.sleep(0.0005)
    assert probes.is_right()


def test_tasks_that_outlast_the_waiting_of_the_others(native: Native) -> None:
    """The caller and the workers fall asleep in the middle of a run, and are woken."""
    probes = Probes([2, 1, 3], spin=150_000)
    for _ in range(5):
        native.run(probes.launches())
    assert probes.is_right()


def test_counts_that_an_earlier_launch_of_the_list_decides(native: Native) -> None:
    probes = Probes([2, 0, 2], is_dynamic=True)
    first, second, third = probes.launches()
    second.args.expected, third.args.expected = 1, 2
    decide = NativeLaunch("set_count", SetCountArgs(address(probes.counts) + 8, 7), 1)
    probes.num_done = 3
    native.run([first, decide, second, third])
    assert probes.is_right()


def test_an_empty_list_and_one_of_empty_launches_do_nothing(native: Native) -> None:
    native.run([])
    probes = Probes([0, 0])
    native.run(probes.launches())
    assert probes.is_right()


def test_a_launch_of_one_task_runs_at_once_for_any_number_of_tasks_before(native: Native) -> None:
    probes = Probes([1] * 50)
    native.run(probes.launches())
    assert probes.is_right()


def test_a_run_from_within_a_task_is_refused(native: Native) -> None:
    result = np.zeros(1, np.int64)
    args = NestedArgs(native.library.address("lean_pool_run"), native.pool._pool, address(result))
    native.run([NativeLaunch("nested", args, 1)])
    assert result[0] == 1


def test_a_run_beside_another_is_refused_and_leaves_it_alone() -> None:
    native = Native(probe_library(), 2)
    probes = Probes([2, 2], spin=20_000_000)
    launches = LaunchList(native.library, probes.launches())
    running = threading.Thread(target=native.pool.run, args=(launches,))
    running.start()
    refusals = 0
    while running.is_alive():
        try:
            native.run([])
        except LaunchError as error:
            assert "another run" in str(error)  # noqa: PT017 - the first tries may come before the other run
            refusals += 1
        time.sleep(0.001)
    running.join()
    assert refusals
    assert probes.is_right()
    native.close()


def test_closing_waits_for_the_run_of_another_thread_and_later_runs_are_refused() -> None:
    native = Native(probe_library(), 2)
    probes = Probes([2, 2], spin=20_000_000)
    launches = LaunchList(native.library, probes.launches())
    has_started = threading.Event()
    running = threading.Thread(target=lambda: (has_started.set(), native.pool.run(launches)))
    running.start()
    has_started.wait()
    time.sleep(0.005)
    native.close()
    running.join()
    assert probes.is_right()
    with pytest.raises(LaunchError, match="closed"):
        native.run([])


EXITS_DURING_RUNS = """
import threading, time
from native_running import probe_library
from test_native_pool import Probes
from lean_engine.runtime.cpu.native.library import Native
from lean_engine.runtime.cpu.native.pool import LaunchList

native = Native(probe_library(), 3)
launches = LaunchList(native.library, Probes([3, 3] * 20, spin=1000).launches())

def run_for_ever():
    while True:
        native.pool.run(launches)

threading.Thread(target=run_for_ever, daemon=True).start()
time.sleep(0.05)
"""


def test_a_program_may_exit_while_a_daemon_thread_is_in_a_run() -> None:
    paths = os.pathsep.join(map(str, (Path(__file__).parents[2], Path(__file__).parents[1], Path(__file__).parent)))
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", EXITS_DURING_RUNS], env={**os.environ, "PYTHONPATH": paths}, capture_output=True,
            text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")


def test_pools_come_and_go() -> None:
    library = probe_library()
    for num_threads in [1, 2, 5] * 20:
        native = Native(library, num_threads)
        probes = Probes([3, 1])
        native.run(probes.launches())
        assert probes.is_right()
        native.close()


def test_a_pool_that_is_dropped_ends_its_threads() -> None:
    before = num_threads_of_process()
    pool = Pool(probe_library(), 4)
    assert num_threads_of_process() == before + 3
    del pool
    assert num_threads_of_process() == before


def num_threads_of_process() -> int:
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("this system does not list a process's threads")
    return len(os.listdir("/proc/self/task"))


def run_in_child(native: Native, queue: multiprocessing.Queue[bool]) -> None:
    probes = Probes([2, 4, 1])
    native.run(probes.launches())
    queue.put(probes.is_right())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_runs_on_threads_of_its_own(native: Native) -> None:
    native.run(Probes([2]).launches())
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=run_in_child, args=(native, queue))
    child.start()
    assert queue.get(timeout=20)
    child.join(timeout=20)
    assert child.exitcode == 0
    probes = Probes([2, 2])
    native.run(probes.launches())
    assert probes.is_right()


def test_a_kernel_that_the_library_lacks_is_named() -> None:
    native = Native(probe_library(), 1)
    with pytest.raises(LaunchError, match="exports no unheard_of"):
        native.run([NativeLaunch("unheard_of", SetCountArgs(), 1)])
    native.close()
