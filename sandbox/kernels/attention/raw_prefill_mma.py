from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

from sandbox import arrays
from sandbox.kernels.attention import prefill_attention
from sandbox.kernels.attention.checks import CODES
from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.cuda.device import device_info, shared_per_block
from sandbox.kernels.lse import NATURAL
from sandbox.kernels.strides import element_strides

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "prefill_mma", min_cc=(8, 0))
CHUNK_BYTES = 16
PANEL_COLUMNS = 64
RESERVED_BYTES = 1024
"""Shared memory that a resident block takes beside its own."""
WORK_BYTES = 32
"""`Work` of the kernel."""
REGISTERS_OF_SM = 65536
OTHER_REGISTERS = 80
"""What a thread needs beside its scores and sums."""
ACCUMULATORS = 192
"""Scores and sums that a thread can hold."""
L2_SHARE = 0.6
"""Part of L2 that the keys and values of the heads under way may take."""
WAVES = 2
"""Times that the heads under way should fill the GPU, so that short blocks end the last."""


class Tiling(NamedTuple):
    """`16 * m_tiles * warps` queries a block against `block_k` keys at a time; how many tiles of
    keys and of values there is room for."""

    m_tiles: int
    warps: int
    block_k: int
    k_stages: int
    v_stages: int

    @property
    def block_q(self) -> int:
        return 16 * self.m_tiles * self.warps

    def accumulators(self, v_dim: int) -> int:
        return self.m_tiles * (_whole(v_dim, 16) + self.block_k) // 2

    def shared_bytes(self, qk_dim: int, v_dim: int, codes: bool) -> int:
        rows = self.block_q + self.k_stages * self.block_k, self.v_stages * self.block_k
        total = sum(n * 2 * _whole(dim, PANEL_COLUMNS) for n, dim in zip(rows, (qk_dim, v_dim)))
        if codes:
            threads = 32 * self.warps
            waiting = _whole(self.block_k, threads // 4)
            total += sum(waiting * _whole(dim, PANEL_COLUMNS) for dim in (qk_dim, v_dim))
        return total + WORK_BYTES


TILINGS = (
    Tiling(2, 4, 64, 2, 1),
    Tiling(2, 4, 64, 1, 1),
    Tiling(1, 4, 64, 2, 1),
    Tiling(1, 4, 64, 1, 1),
    Tiling(1, 4, 32, 1, 1),
    Tiling(1, 2, 32, 1, 1),
)
"""The first that fits is taken; the first of few queries a block where requests have no more than
`FEW_QUERIES` on average, or where larger blocks would be fewer than `FEW_BLOCKS` for each SM."""
FEW_QUERIES = 64
FEW_BLOCKS = 2


def _whole(length: int, of: int) -> int:
    return -(-length // of) * of


class _Gpu(NamedTuple):
    sms: int
    shared_per_block: int
    shared_per_sm: int
    l2_bytes: int


SMS, L2_BYTES = 132, 50 << 20
"""Of the GPU that arrays in CPU memory are planned for."""


def _gpu(array: Any) -> _Gpu:
    if not arrays.is_gpu(array):
        shared = shared_per_block(on_gpu=False)
        return _Gpu(SMS, shared, shared + RESERVED_BYTES, L2_BYTES)
    info = device_info(array.device.id)
    return _Gpu(info.sms, info.shared_per_block, info.shared_per_sm, info.l2_bytes)


def _tiling(q: Any, v: Any, requests: int) -> Tiling | None:
    gpu = _gpu(q)
    tokens, heads, qk_dim = q.shape
    fit = [
        tiling
        for tiling in TILINGS
        if tiling.accumulators(v.shape[2]) <= ACCUMULATORS
        and not (q.dtype == CODES and tiling.k_stages > 1)
        and tiling.shared_bytes(qk_dim, v.shape[2], q.dtype == CODES) <= gpu.shared_per_block
    ]
    if not fit:
        return None
    blocks = (tokens // fit[0].block_q + requests) * heads
    if tokens <= FEW_QUERIES * requests or blocks < FEW_BLOCKS * gpu.sms:
        fit = [tiling for tiling in fit if tiling.m_tiles == 1] or fit
    return fit[0]


def _misaligned(array: Any) -> bool:
    places = arrays.address(array) | array.shape[2] * array.dtype.itemsize
    for length, stride in zip(array.shape[:2], array.strides):
        if length > 1:
            places |= stride
    return places % CHUNK_BYTES != 0


def _unsupported(q: Any, k: Any, v: Any, cu_seqlens_q: Any, **_: Any) -> str | None:
    if any(map(_misaligned, (q, k, v))):
        return f"heads must start at, and be, multiples of {CHUNK_BYTES} bytes"
    if _tiling(q, v, cu_seqlens_q.shape[0] - 1) is None:
        return f"D = {q.shape[2]} and V = {v.shape[2]} take too much shared memory or registers"
    return None


def _strides(arguments: dict[str, Any]) -> bytes:
    """`PrefillStrides`."""
    found = [s for name in "qkv" for s in arguments[name].strides[:2]]
    out, lse = arguments["out"], arguments["out_lse"]
    found += element_strides(out)[:2]
    steps = (0, 0) if lse is None else element_strides(lse)
    found += steps[::-1] if arguments["lse_layout"] == "NT" else steps
    return struct.pack("10q", *found)


def _out_elements(out: Any) -> int:
    """How many results can be stored at once wherever a multiple of them begins: 8, 2 or 1."""
    item = out.dtype.itemsize
    places = 8 | arrays.address(out) // item | out.shape[2]
    for length, stride in zip(out.shape[:2], out.strides):
        if length > 1:
            places |= stride // item
    return {8: 8, 1: 1}.get(places & -places, 2)


def _group_heads(q: Any, k: Any, v: Any, tiles: int, resident: int) -> int:
    gpu = _gpu(q)
    head_bytes = k.shape[0] * (k.shape[2] + v.shape[2]) * k.dtype.itemsize
    wanted = -(-WAVES * resident * gpu.sms // tiles)
    room = int(L2_SHARE * gpu.l2_bytes) // max(1, head_bytes)
    groups = -(-q.shape[1] // max(1, min(wanted, room)))
    return -(-q.shape[1] // groups)


@prefill_attention.variant(
    "raw_mma",
    kind="cuda",
    min_cc=(8, 0),
    dtypes=("float16", "bfloat16", "uint8"),
    supports=_unsupported,
    preference=30,
)
def raw_mma(**arguments: Any) -> None:
    """Tensor cores (mma.sync) on swizzled tiles that arrive while the one before is worked on."""
    q, k, v, out = (arguments[name] for name in ("q", "k", "v", "out"))
    tokens, heads, qk_dim = q.shape
    v_dim = v.shape[2]
    requests = arguments["cu_seqlens_q"].shape[0] - 1
    if not tokens:
        return
    tiling = _tiling(q, v, requests)
    codes = q.dtype == CODES
    shared_bytes = tiling.shared_bytes(qk_dim, v_dim, codes)
    threads = 32 * tiling.warps
    registers = min(_whole(tiling.accumulators(v_dim) + OTHER_REGISTERS, 8), 256)
    resident = min(
        _gpu(q).shared_per_sm // (shared_bytes + RESERVED_BYTES),
        REGISTERS_OF_SM // (registers * threads),
    )
    tiles = tokens // tiling.block_q + requests + 1
    group_heads = _group_heads(q, k, v, tiles, resident)
    KERNEL(
        tiles * heads,
        threads,
        q,
        k,
        v,
        arguments["cu_seqlens_q"],
        arguments["cu_seqlens_k"],
        out,
        arguments["out_lse"],
        _strides(arguments),
        requests,
        tokens,
        k.shape[0],
        heads,
        group_heads,
        tiles,
        arguments["softmax_scale"] / NATURAL["2"],
        NATURAL["2"] / NATURAL[arguments["lse_base"]],
        arguments["q_descale"],
        arguments["k_descale"],
        arguments["v_descale"],
        macros={
            "ELEMENT": q.dtype,
            "RESULT": out.dtype,
            "QK_DIM": qk_dim,
            "V_DIM": v_dim,
            "CAUSAL": arguments["causal"],
            "OUT_ELEMENTS": _out_elements(out),
            "HAS_LSE": arguments["out_lse"] is not None,
            "M_TILES": tiling.m_tiles,
            "WARPS": tiling.warps,
            "BLOCK_K": tiling.block_k,
            "K_STAGES": tiling.k_stages,
            "V_STAGES": tiling.v_stages,
            "BLOCKS_PER_SM": resident,
            "SHARED_BYTES": shared_bytes,
        },
        shared_bytes=shared_bytes,
    )
