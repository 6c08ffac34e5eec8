"""Faster takes the way that was faster when last tried, and keeps looking at the other."""

from lean_engine.runtime.cpu.faster import TRY_OTHER_EVERY, Faster


class Ways:
    """Two ways whose costs the test sets, on a clock that only they advance."""

    def __init__(self, first: float, second: float) -> None:
        self.now, self.costs, self.taken = 0.0, [first, second], ""
        self.faster = Faster(lambda: self.take(0), lambda: self.take(1), clock=lambda: self.now)

    def take(self, way: int) -> None:
        self.now += self.costs[way]
        self.taken += "ab"[way]

    def call(self, count: int) -> str:
        """The ways taken by the next calls."""
        start = len(self.taken)
        for _ in range(count):
            self.faster()
        return self.taken[start:]


def test_both_ways_are_tried_and_the_faster_one_is_kept() -> None:
    assert Ways(1.0, 2.0).call(6) == "abaaaa"
    assert Ways(2.0, 1.0).call(6) == "abbbbb"


def test_the_other_way_is_tried_again_now_and_then() -> None:
    ways = Ways(1.0, 2.0)
    taken = ways.call(3 * TRY_OTHER_EVERY)
    assert taken.count("b") == 1 + 3
    assert taken[TRY_OTHER_EVERY - 1] == "b"


def test_a_change_of_fortune_is_noticed() -> None:
    ways = Ways(1.0, 2.0)
    ways.call(5)
    ways.costs = [8.0, 2.0]  # another process wants the processor
    assert ways.call(4) == "abbb"
    ways.costs = [1.0, 2.0]  # and is gone
    assert ways.call(2 * TRY_OTHER_EVERY).endswith("aaaa")
