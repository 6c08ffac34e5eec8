"""Team: tasks run side by side, all of them finish, and an error in any of them reaches the caller."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from lean_engine.runtime.cpu.team import Team, split


@pytest.fixture(params=[1, 2, 3])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    team = Team(request.param)
    yield team
    team.close()


def test_each_task_runs_once(team: Team) -> None:
    for num_tasks in range(1, team.num_threads + 1):
        done: list[int] = []
        team.run([partial(done.append, i) for i in range(num_tasks)])
        assert sorted(done) == list(range(num_tasks))


def test_each_task_has_a_thread_of_its_own_the_first_the_callers(team: Team) -> None:
    names: list[str] = [""] * team.num_threads

    def task(i: int) -> None:
        names[i] = threading.current_thread().name

    team.run([partial(task, i) for i in range(team.num_threads)])
    assert names[0] == threading.current_thread().name
    assert names[1:] == [f"lean-engine-{i}" for i in range(1, team.num_threads)]


def test_tasks_run_at_the_same_time() -> None:
    team = Team(3)
    meeting = threading.Barrier(3, timeout=5)
    team.run([meeting.wait] * 3)
    team.close()


def test_run_returns_when_the_slowest_is_done() -> None:
    team = Team(2)
    done: list[str] = []

    def slow() -> None:
        time.sleep(0.05)
        done.append("slow")

    team.run([partial(done.append, "fast"), slow])
    assert done == ["fast", "slow"]
    team.close()


def fail() -> None:
    raise ValueError("in a task")


def test_error_of_a_worker_reaches_the_caller_and_the_team_goes_on() -> None:
    team = Team(2)
    done: list[int] = []
    for _ in range(2):
        with pytest.raises(ValueError, match="in a task"):
            team.run([partial(done.append, 1), fail])
    team.run([partial(done.append, 2), partial(done.append, 2)])
    assert done == [1, 1, 2, 2]
    team.close()


def test_error_of_the_callers_task_waits_for_the_workers() -> None:
    team = Team(2)
    done: list[int] = []

    def slow() -> None:
        time.sleep(0.05)
        done.append(1)

    with pytest.raises(ValueError, match="in a task"):
        team.run([fail, slow])
    assert done == [1]
    team.run([partial(done.append, 2), partial(done.append, 3)])
    assert sorted(done) == [1, 2, 3]
    team.close()


def test_errors_of_several_tasks_leave_no_worker_behind() -> None:
    team = Team(3)
    with pytest.raises(ValueError, match="in a task"):
        team.run([fail, fail, fail])
    done: list[int] = []
    team.run([partial(done.append, i) for i in range(3)])
    assert sorted(done) == [0, 1, 2]
    team.close()


def test_close_ends_the_threads() -> None:
    def workers() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "lean-engine-1"]

    before = set(workers())
    team = Team(2)
    (worker,) = set(workers()) - before
    team.close()
    worker.join(timeout=5)
    assert not worker.is_alive()
    team.close()  # a second time changes nothing


def test_a_team_that_is_dropped_ends_its_threads() -> None:
    before = set(threading.enumerate())
    team = Team(3)
    workers = set(threading.enumerate()) - before
    assert len(workers) == 2
    del team
    gc.collect()
    for worker in workers:
        worker.join(timeout=5)
        assert not worker.is_alive()


def test_many_small_runs_finish() -> None:
    team = Team(2)
    counts = [0, 0]

    def count(i: int) -> None:
        counts[i] += 1

    tasks = [partial(count, 0), partial(count, 1)]
    for _ in range(2000):
        team.run(tasks)
    assert counts == [2000, 2000]
    team.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_runs_on_threads_of_its_own() -> None:
    team = Team(2)
    team.run([int, int])
    child = multiprocessing.get_context("fork").Process(target=team.run, args=([int, int],))
    child.start()
    child.join(timeout=20)
    assert child.exitcode == 0
    team.close()


@pytest.mark.parametrize("count", [0, 1, 2, 5, 16, 17])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_split_covers_everything_in_order_and_nearly_equal(count: int, parts: int) -> None:
    slices = split(count, parts)
    assert [i for s in slices for i in range(s.start, s.stop)] == list(range(count))
    sizes = [s.stop - s.start for s in slices]
    assert len(slices) == min(count, parts)
    assert not sizes or max(sizes) - min(sizes) <= 1
