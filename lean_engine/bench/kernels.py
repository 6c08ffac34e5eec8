"""How fast each kernel of a device is, against what the device can do at most.

Ceilings are measured in the same run: bytes per second of reading and copying, operations per second of a large
product. A launch's bound is the longer of its bytes over the one and its operations over the other; its share is that
bound over its time. Weights and caches are cold: launches go around copies of them that no cache holds all of, as the
layers of a model do; activations are warm. Times are the least of several samples, each of many launches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lean_engine.bench.kernel_cases import RANDOM, Case, Operand
from lean_engine.dtypes import numpy_dtype
from lean_engine.ir.graph import TensorType, Value
from lean_engine.ir.sources import Stack, Tensor
from lean_engine.passes import Launch
from lean_engine.runtime.device import Device, LaunchArgs, Replay
from lean_engine.runtime.kernels import KERNELS

COLD_BYTES = 512 * 2**20  # of copies of weights and caches together
MAX_COPIES = 256
AROUND_SECONDS = 0.2  # that one round over all copies may take: where it takes longer, reading weights is little of it
SAMPLE_SECONDS = 0.05
NUM_SAMPLES = 5
NUM_WARMUPS = 20  # launches; devices that choose between ways of computing have chosen then
CEILING_BYTES = 256 * 2**20
CEILING_SIZE = 1024  # rows and columns of the large product


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device can do at most, as measured."""

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True, slots=True)
class KernelFigures:
    """One case."""

    kernel: str
    shape: str
    num_bytes: int
    flops: int
    seconds: float  # of a launch
    weights: str  # the form of its matrices; "" where it has none

    def share(self, ceilings: Ceilings) -> float:
        """Of the ceiling that binds."""
        return self.bound(ceilings) / self.seconds

    def bound(self, ceilings: Ceilings) -> float:
        """Seconds that it needs at least."""
        return max(self.num_bytes / ceilings.bytes_per_second, self.flops / ceilings.flops_per_second)

    def is_memory_bound(self, ceilings: Ceilings) -> bool:
        return self.num_bytes / ceilings.bytes_per_second >= self.flops / ceilings.flops_per_second

    def figures(self, ceilings: Ceilings) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "kernel": self.kernel,
            "shape": self.shape,
            "weights": self.weights,
            "bytes": self.num_bytes,
            "flops": self.flops,
            "seconds": self.seconds,
            "gb_per_second": self.num_bytes / self.seconds / 1e9,
            "gflop_per_second": self.flops / self.seconds / 1e9,
            "bound": "memory" if self.is_memory_bound(ceilings) else "arithmetic",
            "share": self.share(ceilings),
        }


class Bench:
    """Measures cases on one device.

    Args:
        stored_type: how weight matrices are stored before the device makes its form of them.
    """

    def __init__(self, device: Device, stored_type: str) -> None:
        self.device = device
        self.stored_type = stored_type
        self.random = np.random.default_rng(0)

    def measure(self, case: Case, is_cold: bool = True) -> KernelFigures:
        """One case, timed.

        Args:
            is_cold: weights and caches come from memory.

        Raises:
            LaunchError: the case does not fit the kernel table: a bug.
        """
        inputs = [self.make(operand) for operand in case.inputs]
        outputs = [inputs[o.alias] if o.alias is not None else self.make(o, is_output=True) for o in case.outputs]
        launches = [self.launch(case, inputs, outputs)]
        if is_cold:
            replay = self.device.capture(launches)
            alone = min(self.run(replay, 1, outputs[0]) for _ in range(3))
            launches += [self.launch(case, copy, outputs) for copy in self.copies(case, inputs, AROUND_SECONDS / alone)]
        seconds = self.seconds(self.device.capture(launches), outputs[0], len(launches)) / len(launches)
        matrices = [x for o, x in zip(case.inputs, inputs, strict=True) if o.kind == "matrix"]
        forms = sorted({str(getattr(x, "format", None) or x.dtype) for x in matrices})
        return KernelFigures(
            case.kernel, case.shape, num_bytes(case, inputs, outputs), case.flops, seconds, " ".join(forms)
        )

    def ceilings(self) -> Ceilings:
        """What the device can do at most."""
        side = CEILING_SIZE
        square = Operand((side, side))
        case = Case("gemm", "", [square, Operand((side, side), "matrix")], [square], {}, 0)
        product = 2 * side**3 / self.measure(case, is_cold=False).seconds
        if self.device.name == "cpu":
            product = max(product, 2 * side**3 / blas_seconds(side))
        return Ceilings(self.bandwidth(), product)

    def bandwidth(self) -> float:
        """Bytes per second: of a copy with all threads, or of reading, whichever is more; on a GPU of an addition."""
        if self.device.name == "cpu":
            return host_bandwidth(getattr(self.device, "num_threads", 1))
        columns = 4096
        rows = CEILING_BYTES // 4 // columns
        sums = [Operand((rows, columns))] * 2
        found = self.measure(Case("add", "", sums, [Operand((rows, columns))], {}, 0))
        return found.num_bytes / found.seconds

    # -- inside

    def make(self, operand: Operand, is_output: bool = False) -> Any:
        """A buffer of the device that holds the operand's values."""
        if operand.kind == "matrix":
            return self.make_matrix(operand.shape)
        names = {"real": self.device.compute_dtype, "kv": self.device.kv_cache_dtype, "f32": "float32", "i32": "int32"}
        array = self.device.allocate(operand.shape, names[operand.kind])
        if not is_output:
            self.device.fill(array, lambda host: self.write(host, operand))
        return array

    def write(self, host: NDArray[Any], operand: Operand) -> None:
        if isinstance(operand.values, str):
            assert operand.values == RANDOM
            host[...] = self.random.standard_normal(operand.shape, np.float32)
        else:
            host[...] = operand.values

    def make_matrix(self, shape: tuple[int, ...]) -> Any:
        values = self.random.standard_normal(shape, np.float32) * np.float32(0.02)
        if not self.device.matrix_formats:
            array = self.device.allocate(shape, self.device.compute_dtype)
            self.device.fill(array, lambda host: host.__setitem__(..., values))
            return array
        store = Store(values.astype(numpy_dtype(self.stored_type)), self.stored_type)
        if len(shape) == 2:
            return self.device.load_matrix(Tensor("all", shape), store)
        return self.device.load_matrix(Stack(tuple(Tensor(str(i), shape[1:]) for i in range(shape[0]))), store)

    def copies(self, case: Case, inputs: Sequence[Any], most: float) -> Iterator[list[Any]]:
        """Further inputs, with matrices and caches of their own: as many as no cache holds all of, at most `most`."""
        cold = [i for i, o in enumerate(case.inputs) if o.kind in ("matrix", "kv")]
        total = sum(inputs[i].nbytes for i in cold)
        if not total or any(o.alias is not None for o in case.outputs):  # what is only written comes from no cache
            return
        room = min(COLD_BYTES, self.device.memory_bytes() // 4)
        for _ in range(min(MAX_COPIES, math.ceil(room / total), math.ceil(most)) - 1):
            yield [self.make(o) if i in cold else x for i, (o, x) in enumerate(zip(case.inputs, inputs, strict=True))]

    def launch(self, case: Case, inputs: Sequence[Any], outputs: Sequence[Any]) -> LaunchArgs:
        kernel = KERNELS[case.kernel]
        real, kv = self.device.compute_dtype, self.device.kv_cache_dtype
        scalars = kernel.check(inputs, outputs, case.scalars, real, kv, self.device.matrix_formats)
        values = [
            tuple(Value(f"{name}{i}", TensorType(tuple(x.shape), dtype_of(x, real))) for i, x in enumerate(operands))
            for name, operands in (("in", inputs), ("out", outputs))
        ]
        size = self.device.workspace_bytes(Launch(case.kernel, values[0], values[1], case.scalars), {})
        return LaunchArgs(case.kernel, inputs, outputs, scalars, self.device.allocate((size,), "uint8"))

    def seconds(self, replay: Replay, output: Any, num_launches: int) -> float:
        """Of one replay, of so many launches: the least of several samples."""
        once = min(self.run(replay, 1, output) for _ in range(max(2, NUM_WARMUPS // num_launches)))
        count = max(1, round(SAMPLE_SECONDS / once))
        return min(self.run(replay, count, output) / count for _ in range(NUM_SAMPLES))

    def run(self, replay: Replay, count: int, output: Any) -> float:
        """Seconds of so many replays."""
        started = time.perf_counter()
        for _ in range(count):
            replay()
        self.device.read(output.reshape(-1)[:1])  # waits for a GPU
        return time.perf_counter() - started


class Store:
    """A checkpoint of one matrix, or of a stack whose parts are named by their numbers."""

    def __init__(self, values: NDArray[Any], stored_type: str) -> None:
        self.values = values
        self._stored_type = stored_type

    def tensor(self, name: str) -> NDArray[Any]:
        part: NDArray[Any] = self.values if name == "all" else self.values[int(name)]
        return part

    stored = tensor

    def stored_type(self, name: str) -> str:
        return self._stored_type

    def release(self, name: str) -> None:
        """Nothing is mapped."""


def dtype_of(operand: Any, real: str) -> str:
    return operand.dtype.name if hasattr(operand, "dtype") else real


def num_bytes(case: Case, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """What must move: inputs read and outputs written, those that are only partly so by their share."""
    read = sum(x.nbytes * case.partly_read.get(i, 1.0) for i, x in enumerate(inputs))
    written = sum(x.nbytes * case.partly_written.get(i, 1.0) for i, x in enumerate(outputs))
    return round(read + written)


def host_bandwidth(num_threads: int) -> float:
    """Bytes per second that so many threads copy, or read, at most. NumPy lets go of Python's lock meanwhile."""
    source = np.ones(CEILING_BYTES // 4, np.float32)
    target = np.empty_like(source)
    parts = [np.array_split(array, num_threads) for array in (source, target)]

    def copy(i: int) -> None:
        np.copyto(parts[1][i], parts[0][i])

    def read(i: int) -> None:
        np.max(parts[0][i])

    with ThreadPoolExecutor(num_threads) as threads:
        copied = 2 * source.nbytes / least(lambda: list(threads.map(copy, range(num_threads))))
        return max(copied, source.nbytes / least(lambda: list(threads.map(read, range(num_threads)))))


def blas_seconds(side: int) -> float:
    """Of a square product by NumPy, in float32."""
    a = np.ones((side, side), np.float32)
    return least(lambda: a @ a)


def least(run: Callable[[], object]) -> float:
    """Seconds of the fastest of several runs."""
    times = []
    for _ in range(NUM_SAMPLES):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)
