"""What the emulator says of a kernel or a launch that breaks a rule."""

from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np
import pytest
from cuda_host import HostKernel, KernelError
from host_running import HERE, kernel

LINES = (HERE / "intrinsics.cu").read_text().splitlines()


def get(name: str, is_checked: bool = True) -> HostKernel:
    return kernel("intrinsics.cu", name, is_checked)


def line_of(text: str) -> str:
    """intrinsics.cu:<the line that holds the text>"""
    (number,) = (i + 1 for i, line in enumerate(LINES) if text in line)
    return f"intrinsics.cu:{number}"


def ints(count: int = 64) -> np.ndarray:
    return np.zeros(count, np.int32)


def floats(count: int = 64) -> np.ndarray:
    return np.zeros(count, np.float32)


@pytest.mark.parametrize("is_checked", [False, True])
def test_deadlock_says_who_waits_where(is_checked: bool) -> None:
    with pytest.raises(KernelError, match="deadlock in block \\(0,0,0\\)") as caught:
        get("stuck", is_checked)((1,), (64,), (ints(),))
    text = str(caught.value)
    place = line_of("if (threadIdx.x < 40) __syncwarp();")
    assert f"8 threads at a warp collective with mask ffffffff of {place} (warp 1)" in text
    assert "56 threads at the block barrier of intrinsics.cu:" in text


@pytest.mark.parametrize("order", [0, 1, 5])
def test_shuffle_from_a_lane_outside_the_mask(order: int) -> None:
    with pytest.raises(KernelError, match=r"lane \d+ is not in the mask 0000ffff|from lane 20, which takes no part"):
        get("shuffles_from_outside")((1,), (32,), (ints(),), order=order)


def test_barriers_at_different_places() -> None:
    with pytest.raises(KernelError, match="threads of one block meet at different barriers"):
        get("meets_elsewhere")((1,), (64,), (ints(),))


def test_trap_names_its_line_and_thread() -> None:
    out = ints()
    get("traps")((1,), (1,), (out,))
    out[0] = 1
    wanted = f"{line_of('__trap();')}: block (0,0,0) thread 0: __trap()"
    with pytest.raises(KernelError, match=re.escape(wanted)):
        get("traps")((1,), (1,), (out,))


def test_index_past_an_array_of_known_size() -> None:
    get("indexes_past_an_array")((1,), (1,), (ints(), np.int32(3)))
    with pytest.raises(KernelError, match=f"{line_of('out[0] = values')}: .*index 4 of an array"):
        get("indexes_past_an_array")((1,), (1,), (ints(), np.int32(4)))


def test_bounds_are_those_of_the_view() -> None:
    x, y = floats(), floats()
    with pytest.raises(
        KernelError,
        match="out of bounds: read of 4 bytes in no array; the nearest place is 0 bytes past the end of argument 1",
    ):
        get("plus")((1,), (64,), (y, x[:40], np.float32(2), np.int32(64)))
    with pytest.raises(KernelError, match=f"{line_of('y[i] = x[i] + a')}: .*write of 4 bytes in no array"):
        get("plus")((1,), (64,), (y[:40], x, np.float32(2), np.int32(64)))


def test_read_only_arrays_are_not_written() -> None:
    y = floats()
    y.flags.writeable = False
    with pytest.raises(KernelError, match="write to argument 0, which is a read-only array"):
        get("plus")((1,), (64,), (y, floats(), np.float32(2), np.int32(64)))


def test_misaligned_access() -> None:
    x = np.zeros(260, np.uint8)[2:258].view(np.float32)
    with pytest.raises(KernelError, match="misaligned"):
        get("plus")((1,), (64,), (floats(), x, np.float32(2), np.int32(64)))


def test_dynamic_shared_memory_ends_where_the_launch_says() -> None:
    with pytest.raises(KernelError, match="at offset 128 of dynamic shared memory, which has 128 bytes"):
        get("reversed_in_shared")((1,), (64,), (floats(),), shared_mem=128)


def test_shared_memory_that_nobody_wrote() -> None:
    with pytest.raises(
        KernelError, match="uninitialised: read of shared memory that no thread of the block has written"
    ):
        get("reads_unwritten")((1,), (64,), (floats(),))
    out = floats()
    get("reads_unwritten", is_checked=False)((1,), (64,), (out,))
    assert np.isnan(out[0])
    assert (out[1:] == 1).all()


def test_atomic_and_plain_access_race() -> None:
    with pytest.raises(KernelError, match=r"race: (written|read) here, (written|read) by thread"):
        get("mixes_atomic_and_plain")((1,), (64,), (ints(),))


@pytest.mark.parametrize("order", [0, 1, 9])
def test_two_threads_or_blocks_that_write_one_place_race(order: int) -> None:
    with pytest.raises(KernelError, match=r"race: written here, written by thread .* with no barrier between"):
        get("writes_its_neighbours_place")((1,), (2,), (floats(),), order=order)
    with pytest.raises(KernelError, match=r"of block [01] .* with no fence and atomic between"):
        get("writes_its_neighbours_place")((2,), (1,), (floats(),), order=order)


@pytest.mark.parametrize(
    "args",
    [
        (floats(), floats(), 2.0, np.int32(8)),
        (floats(), floats(), np.float64(2), np.int32(8)),
        (floats(), floats(), np.float32(2), np.int64(8)),
        (floats(), floats().astype(np.float64), np.float32(2), np.int32(8)),
        (floats(), ints(), np.float32(2), np.int32(8)),
        (floats(), [0.0], np.float32(2), np.int32(8)),
        (floats(), floats(), np.float32(2)),
    ],
)
def test_argument_of_the_wrong_type_is_refused(args: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=r"argument [123]: the kernel wants|takes 4 arguments, not 3"):
        get("plus")((1,), (8,), args)


@pytest.mark.parametrize(
    ("grid", "block", "shared", "message"),
    [
        ((0,), (32,), 0, r"grid is \(0, 1, 1\)"),
        ((1, 65536), (32,), 0, r"grid is \(1, 65536, 1\)"),
        ((1,), (1025,), 0, r"block is \(1025, 1, 1\)"),
        ((1,), (64, 32), 0, "a block of 2048 threads, at most 1024"),
        ((1,), (32,), 49153, "49153 bytes of dynamic shared memory, at most 49152 were asked for"),
    ],
)
def test_launch_that_cuda_refuses_is_refused(
    grid: tuple[int, ...], block: tuple[int, ...], shared: int, message: str
) -> None:
    with pytest.raises(KernelError, match=message):
        get("reversed_in_shared")(grid, block, (floats(),), shared_mem=shared)


def test_launch_bounds_hold() -> None:
    bounded = kernel("samples.cu", "tile_product<bfloat16>")
    with pytest.raises(KernelError, match="a block of 160 threads, at most 128 are possible"):
        bounded((1,), (160,), (None, None, None, np.int32(0), np.int32(0), np.int32(0)))


def test_launch_works_again_after_an_error_and_in_other_threads() -> None:
    with pytest.raises(KernelError):
        get("stuck")((1,), (64,), (ints(),))
    outs = [floats() for _ in range(4)]
    launch = get("reversed_in_shared")
    threads = [threading.Thread(target=launch, args=((1,), (64,), (out,)), kwargs={"shared_mem": 256}) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(out, np.arange(63, -1, -1)) for out in outs)


def test_bound_launch_reads_what_its_arrays_hold_then() -> None:
    x, y = floats(), floats()
    launch = get("plus").bind((1,), (64,), (y, x, np.float32(2), np.int32(64)))
    for value in (1, 5):
        x[:] = value
        launch()
        assert (y == value + 2).all()


def test_profile_counts_sectors_and_bank_passes() -> None:
    x = np.zeros(64 + 8, np.float32)
    x = x[-x.ctypes.data % 32 // 4 :][:64]  # begins at a sector
    y = np.zeros(64, np.float32)
    with pytest.raises(ValueError, match="is_checked"):
        get("plus", is_checked=False).profile((1,), (64,), (y, x, np.float32(0), np.int32(64)))
    rows = get("plus").profile((1,), (64,), (y, x, np.float32(0), np.int32(64)))
    (read,) = (row for row in rows if row.access == "global read")
    assert read.where == line_of("y[i] = x[i] + a")
    assert (read.num_requests, read.num_lanes, read.num_bytes) == (2, 64, 256)
    assert read.num_transactions == read.num_ideal == 8
    assert {row.access for row in rows} == {"global read", "global write"}
