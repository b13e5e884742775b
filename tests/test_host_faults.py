"""Faults of kernels that the host runner finds, and right kernels that it lets pass."""

import re
import subprocess

import numpy as np
import pytest
from host_launch import KERNELS, launch, module
from variants_here import needs_host

from sandbox.kernels.cuda.host_runner import KernelFault, compiler

pytestmark = needs_host

FAULTS = {
    "reads_past_the_end": r"thread \(60,0,0\): 4-byte read at {here} right past the end of "
    r"argument `in`, which has 256 bytes",
    "writes_before_the_start": "4-byte write .* 8 bytes before the start of argument `out`",
    "writes_between_rows": r"thread \(41,0,0\): .* bytes \d+ to \d+ from the start of argument "
    "`out`, which its strides leave out",
    "copies_past_the_end": "260-byte read .* whose last 4 bytes lie past the end of argument `in`",
    "misaligned": "uint4.* at a misaligned address: 4 bytes past a multiple of 16 at {here}",
    "writes_its_input": "4-byte write at {here} of argument `in`, .* takes as const",
    "missing_barrier": r"read at {here} of shared `tile`, byte \d+, (a race with|which no)",
    "missing_second_barrier": r"thread \(\d+,0,0\): 4-byte (read|write) at {here} of "
    r"dynamic shared memory, byte \d+, a race with the (read|write) at {here} by thread",
    "missing_warp_barrier": r"shared `tile`, byte \d+, (a race with|which no)",
    "counts_without_atomics": "shared `count`, byte 0, a race with the",
    "uninitialised": "shared `tile`, byte 0, which no thread of the block has written",
    "past_dynamic_shared": "write at .* right past the end of dynamic shared memory, .* 256 bytes",
    "two_barriers": r"comes to __syncthreads at {here}, but thread .* waits in "
    r"__syncthreads at {here}",
    "barrier_after_return": r"waits in __syncthreads at {here} for thread \(50,0,0\), which "
    "has returned",
    "reads_a_returned_lane": "__shfl_xor_sync .* reads lane 5, which has returned",
    "reads_outside_the_mask": "__shfl_sync .* mask 0x0000ffff reads lane 16, which is not in the",
    "lane_elsewhere": "waits in .* for lane .*, but that lane waits in",
    "not_in_its_own_mask": "mask 0xfffffffe, in which its own lane 0 is not",
}
IN_EVERY_BUILD = (
    "two_barriers",
    "barrier_after_return",
    "reads_a_returned_lane",
    "reads_outside_the_mask",
    "lane_elsewhere",
    "not_in_its_own_mask",
)


def expected(entry: str, pattern: str) -> str:
    """`pattern` with `{here}` as the lines of the entry that are marked so."""
    lines = (KERNELS / "faults.cu").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if f"void {entry}(" in line)
    end = lines.index("}", start)
    here = [str(i + 1) for i in range(start, end) if lines[i].endswith("// here")]
    return pattern.replace("{here}", rf"faults\.cu:(?:{'|'.join(here)})\b")


def is_clang() -> bool:
    asked = subprocess.run([compiler(), "--version"], capture_output=True, text=True)
    return "clang" in asked.stdout


def faulty(
    entry: str, broken: bool, *, checked: bool = True, seed: int | None = None
) -> np.ndarray:
    """Run a kernel of faults.cu; gives its output."""
    dtype = np.int32 if entry in ("counts_without_atomics", "not_in_its_own_mask") else np.float32
    values = np.arange(64).astype(dtype)
    out = np.full((8, 8), -1, dtype)
    passed = out[:, :4] if entry == "writes_between_rows" else out
    kernel = module("faults.cu", entry, checked=checked)
    launch(kernel, (1,), (64,), passed, values, int(broken), shared_bytes=256, seed=seed)
    return out.ravel()


@pytest.mark.parametrize("entry", FAULTS)
def test_faults_of_the_checked_build(entry):
    faulty(entry, False)
    if entry == "misaligned" and is_clang():
        pytest.skip("clang++ does not check the alignment of structs that it copies whole")
    for seed in (None, 5):
        with pytest.raises(KernelFault) as caught:
            faulty(entry, True, seed=seed)
        message = str(caught.value)
        assert re.match(rf"{entry}, block \(0,0,0\), thread \(\d+,0,0\): ", message)
        if seed is None:
            assert re.search(expected(entry, FAULTS[entry]), message), message


@pytest.mark.parametrize("entry", IN_EVERY_BUILD)
def test_faults_of_the_plain_build(entry):
    faulty(entry, False, checked=False)
    with pytest.raises(KernelFault, match=expected(entry, FAULTS[entry])):
        faulty(entry, True, checked=False)


@pytest.mark.parametrize("entry", ["missing_barrier", "missing_warp_barrier", "uninitialised"])
def test_a_shuffled_schedule_shows_races_in_the_plain_build(entry):
    right = faulty(entry, False, checked=False)
    for seed in range(4):
        np.testing.assert_array_equal(faulty(entry, False, checked=False, seed=seed), right)
        assert not np.array_equal(faulty(entry, True, checked=False, seed=seed), right)


def test_a_seed_repeats_its_schedule():
    runs = [faulty("missing_barrier", True, checked=False, seed=seed) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


UNDEFINED = {
    1: r"signed overflow: 70000 \* 70000 does not fit 'int' at {here}",
    2: r"shift of a 'int' \(1\) by 32 bits",
    3: "division of 7 by zero",
    4: r"index 4 out of bounds of 'int ?\[4\]'",
    5: r"__trap\(\) at {here}",
    6: r"assertion `in\[0\] > 1000` failed at {here}",
    7: "store to a null pointer to 'int'",
}


def test_undefined_arithmetic():
    kernel = module("faults.cu", "undefined_arithmetic")
    values, out = np.zeros(64, np.int32), np.zeros(64, np.int32)
    launch(kernel, (1,), (64,), out, values, 0)
    assert out.tolist() == [1, 2, 3, 4] * 16
    values[0] = 1
    launch(kernel, (1,), (64,), out, values, 0)
    for which, pattern in UNDEFINED.items():
        values[0] = 70000 if which == 1 else 0
        with pytest.raises(KernelFault, match=expected("undefined_arithmetic", pattern)):
            launch(kernel, (1,), (64,), out, values, which)


def test_traps_and_assertions_of_the_plain_build():
    kernel = module("faults.cu", "undefined_arithmetic", checked=False)
    arrays = np.zeros(64, np.int32), np.zeros(64, np.int32)
    for which in (5, 6):
        with pytest.raises(KernelFault, match=expected("undefined_arithmetic", UNDEFINED[which])):
            launch(kernel, (1,), (64,), *arrays, which)
    launch(kernel, (1,), (64,), *arrays, 0)


def test_races_on_global_memory_when_asked_for():
    kernel = module("faults.cu", "blocks_write_one_place")
    out, values = np.zeros(64, np.int32), np.arange(64, dtype=np.int32)
    launch(kernel, (3,), (64,), out, values, 1)
    launch(kernel, (3,), (64,), out, values, 0, global_races=True)
    with pytest.raises(KernelFault, match=r"of byte 0 of argument `out`, which block \(\d,0,0\), "):
        launch(kernel, (3,), (64,), out, values, 1, global_races=True)


def test_the_first_faulty_block_is_reported():
    kernel = module("faults.cu", "barrier_after_return")
    arrays = np.zeros(64, np.float32), np.zeros(64, np.float32)
    for _ in range(3):
        with pytest.raises(KernelFault, match=r"block \(0,0,0\)"):
            launch(kernel, (900,), (64,), *arrays, 1)


def test_arrays_that_share_memory_still_do_when_checked():
    kernel = module("faults.cu", "writes_its_input")
    both = np.arange(64, dtype=np.float32)
    launch(kernel, (1,), (32,), both[32:], both, 0)
    np.testing.assert_array_equal(both, np.tile(np.arange(32), 2))
    backwards = np.zeros(40, np.float32)[::-2]  # its first element lies highest
    with pytest.raises(KernelFault, match="right past the end of argument `out`, which has 156"):
        launch(kernel, (1,), (32,), backwards, both, 0)
    np.testing.assert_array_equal(backwards, 0)
