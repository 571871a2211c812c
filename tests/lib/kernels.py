"""MLX's own kernels in place of ours for as long as a comparison takes; arrays that end where nobody may read."""

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner import cpu


def in_front() -> bool:
    """Returns True if our kernels stand in front of MLX's own in this process."""
    return cpu.find_kernels(os.environ.get("MLX_RUNNER_KERNELS", "auto")).name.startswith("for ")


def library(name: str) -> ctypes.CDLL:
    """Returns a library of `runner/cpu`; skips the test without our kernels."""
    if not in_front():
        pytest.skip("the kernels are not in front of MLX")
    return ctypes.CDLL(str(Path(cpu.__file__).with_name(f"{name}.so")))


def calls() -> int:
    """Returns the number of operations that our kernels have computed so far."""
    counted = library("_kernels").kernels_calls
    counted.restype = ctypes.c_int64
    return int(counted())


def use(width: int, *threads: int) -> None:
    """Puts kernels with vectors of at most `width` float32 numbers in front of MLX; 0 leaves MLX's own."""
    threads = threads or tuple(cpu.Threads.of(1))
    start = library("_shim").shim_start
    start.restype = ctypes.c_void_p
    choose = library("_kernels").kernels_use
    choose.restype = ctypes.c_void_p
    if not choose(width, ctypes.c_void_p(start(*threads)), *threads) and width:
        pytest.skip("this processor has no wide vectors")


@contextmanager
def mlx_own() -> Iterator[None]:
    """MLX's own kernels, within this block: they multiply packed weights as they do others, without rounding."""
    if not in_front():
        yield
        return
    use(0)
    try:
        yield
    finally:
        use(16)


class Guarded:
    """Arrays of numbers, each at the end of pages that are followed by one that nobody may read or write."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._kept: list[mmap.mmap] = []

    def __call__(self, data: "np.ndarray[Any, Any]") -> int:
        page = mmap.PAGESIZE
        size = -(-data.nbytes // page) * page
        memory = mmap.mmap(-1, size + page)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert self._libc.mprotect(ctypes.c_void_p(begin + size), ctypes.c_size_t(page), mmap.PROT_READ * 0) == 0
        place = begin + size - data.nbytes
        ctypes.memmove(place, data.tobytes(), data.nbytes)
        self._kept.append(memory)
        return place
