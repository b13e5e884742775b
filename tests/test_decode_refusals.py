"""Bad input of decode attention is refused by name."""

import numpy as np
import pytest
from attention_problems import (
    NO_BLOCKS,
    POISON,
    TINY,
    decode_problem,
    ints,
    packed_rows,
    poisoned,
)
from numpy.lib.stride_tricks import as_strided

from sandbox.arrays import bfloat16
from sandbox.cache_formats import FORMATS
from sandbox.kernels import decode_attention
from sandbox.kernels.conformance import bits_of

L, E = TINY.L, TINY.E
GOOD = decode_problem([7, 3], tokens=2)
CODES = packed_rows("fp8_e4m3", np.ones((4, E), np.float32), TINY, 1.0)[0]
FP8 = {"cache": np.tile(CODES, (6, 1, 1)), "k_scale": 1.0, "cache_format": "fp8_e4m3"}
INT8 = {"cache": np.zeros((6, 4, FORMATS["int8_per_token"].row_bytes(TINY)), np.uint8)}
INT8["cache_format"] = "int8_per_token"
SPARSE = {**NO_BLOCKS, "indices": np.zeros((2, 2, 5), np.int32)}
TREE = np.zeros((2, 2, 1), np.int32)
ROOM = np.full(2000, POISON, np.float32)
LSE = (TINY.N, 4)
OUT = (2, 2, TINY.N, L)


def changed(name, change):
    return {name: change(GOOD[name])}


def shifted(start, shape):
    return ROOM[start : start + int(np.prod(shape))].reshape(shape)


@pytest.mark.parametrize(
    ("change", "error", "names"),
    [
        ({"q": None}, TypeError, "q is missing"),
        ({"q": [[[[1.0]]]]}, TypeError, "q"),
        (changed("q", lambda q: q[0]), ValueError, "q has shape"),
        (changed("q", lambda q: q.astype(np.float64)), TypeError, "q is float64"),
        (changed("q", lambda q: q.astype(bfloat16)), TypeError, "cache is float32"),
        (changed("q", lambda q: q[..., ::2]), ValueError, "q has a last axis"),
        (changed("q", lambda q: q[::-1]), ValueError, "q has strides"),
        (changed("q", lambda q: q[:, :, :0]), ValueError, "q has shape"),
        (changed("q", lambda q: q[..., :0]), ValueError, "q has shape"),
        (changed("q", lambda q: q[..., :44]), ValueError, "q has 44 columns"),
        (changed("q", lambda q: q[..., :39]), ValueError, "kv_lora_rank is 40"),
        ({"cache": None}, TypeError, "cache is missing"),
        (changed("cache", lambda c: c[0]), ValueError, "cache has shape"),
        (changed("cache", lambda c: c.astype(np.float64)), TypeError, "cache is float64"),
        (changed("cache", lambda c: c.astype(np.float16)), TypeError, "cache is float16"),
        (changed("cache", lambda c: c[..., ::2]), ValueError, "cache has a last axis"),
        (changed("cache", lambda c: c[::-1]), ValueError, "cache has strides"),
        (changed("cache", lambda c: c[:, :0]), ValueError, "cache has shape"),
        (changed("cache", lambda c: c[..., :0]), ValueError, "cache has shape"),
        (changed("cache", lambda c: c[..., :47]), ValueError, "cache has shape"),
        (changed("cache", lambda c: c[..., :32]), ValueError, "cache has shape"),
        ({"cache_format": "fp9"}, ValueError, "fp9"),
        ({"cache_format": "bfloat16"}, (TypeError, ValueError), "bfloat16"),
        ({"cache_format": "fp8_e4m3"}, (TypeError, ValueError), "fp8_e4m3"),
        ({"k_scale": 1.0}, ValueError, "k_scale is given"),
        ({**FP8, "k_scale": None}, ValueError, "k_scale is missing"),
        ({**FP8, "k_scale": 0.0}, ValueError, "k_scale is 0.0"),
        ({**FP8, "k_scale": -1.0}, ValueError, "k_scale is -1.0"),
        ({**FP8, "k_scale": np.nan}, ValueError, "k_scale is nan"),
        ({**FP8, "k_scale": 1e-45}, ValueError, "k_scale is 1"),
        ({**FP8, "k_scale": np.ones(2, np.float32)}, ValueError, "k_scale"),
        ({**FP8, "cache_format": None}, (TypeError, ValueError), "cache_format"),
        ({**FP8, "q_descale": 1.0}, ValueError, "q_descale is given, but q is float32"),
        ({**INT8, "k_scale": 1.0}, ValueError, "k_scale is given"),
        ({**INT8, "cache": INT8["cache"][..., :-1]}, ValueError, "cache has"),
        ({**FP8, "cache_format": "fp8_ds_mla", "k_scale": None}, ValueError, "cache has shape"),
        ({**FP8, "q": np.zeros((2, 2, TINY.N, E), np.uint8)}, ValueError, "q_descale is missing"),
        (
            {**FP8, "q": np.zeros((2, 2, TINY.N, E), np.uint8), "q_descale": -1.0},
            ValueError,
            "q_descale is -1.0",
        ),
        ({"kv_lora_rank": 0}, ValueError, "kv_lora_rank is 0"),
        ({"kv_lora_rank": 39}, ValueError, "kv_lora_rank 39"),
        ({"kv_lora_rank": 50}, ValueError, "kv_lora_rank is 50"),
        ({"kv_lora_rank": 40.0}, TypeError, "kv_lora_rank is float"),
        ({"kv_lora_rank": None}, TypeError, "kv_lora_rank is NoneType"),
        ({"block_table": None}, TypeError, "block_table is missing"),
        (changed("block_table", lambda t: t.astype(np.int64)), TypeError, "block_table is int64"),
        (changed("block_table", lambda t: t[0]), ValueError, "block_table has shape"),
        (changed("block_table", lambda t: t[:1]), ValueError, "block_table has shape"),
        (changed("block_table", lambda t: t[::-1]), ValueError, "block_table has strides"),
        (changed("block_table", lambda t: t[:, ::2]), ValueError, "block_table has a last axis"),
        (changed("block_table", lambda t: t[:, :1]), ValueError, "block_table has 1 columns"),
        ({"block_table": ints([0, 5, 0], [1, 0, 0])}, ValueError, "row 0 has an id beyond 4"),
        ({"seq_lens": None}, TypeError, "seq_lens is missing"),
        ({"seq_lens": ints(7, 3).astype(np.int64)}, TypeError, "seq_lens is int64"),
        ({"seq_lens": ints(7)}, ValueError, "seq_lens has shape"),
        ({"seq_lens": ints([7, 3])}, ValueError, "seq_lens has shape"),
        ({"seq_lens": ints(7, 0, 3, 0)[::2]}, ValueError, "seq_lens has a last axis"),
        ({"seq_lens": ints(7, -1)}, ValueError, r"seq_lens\[1\] is -1"),
        ({"seq_lens": ints(17, 1), "key_mass": None}, ValueError, "block_table has 4 columns"),
        ({"max_seq_len": 6}, ValueError, r"seq_lens\[0\] is 7, more than max_seq_len"),
        ({"max_seq_len": -1}, ValueError, "max_seq_len is -1"),
        ({"max_seq_len": 7.0}, TypeError, "max_seq_len is float"),
        ({"indices": SPARSE["indices"]}, ValueError, "block_table is given"),
        ({**SPARSE, "seq_lens": GOOD["seq_lens"]}, ValueError, "seq_lens is given"),
        ({**SPARSE, "tree_mask": TREE}, ValueError, "tree_mask is given"),
        ({**SPARSE, "window": 3}, ValueError, "window is given"),
        ({**SPARSE, "max_seq_len": 3}, ValueError, "max_seq_len is given"),
        ({**SPARSE, "indices": SPARSE["indices"][:1]}, ValueError, "indices has shape"),
        ({**SPARSE, "indices": SPARSE["indices"][:, :1]}, ValueError, "indices has shape"),
        ({**SPARSE, "indices": SPARSE["indices"][0]}, ValueError, "indices has shape"),
        ({**SPARSE, "indices": np.zeros((2, 2, 5), np.int64)}, TypeError, "indices is int64"),
        ({**SPARSE, "indices": SPARSE["indices"][..., ::2]}, ValueError, "indices has a last"),
        ({**SPARSE, "indices": np.full((2, 2, 5), 20, np.int32)}, ValueError, "slot 20"),
        ({**SPARSE, "key_mass": poisoned((2, 2, 4))}, ValueError, "key_mass has shape"),
        ({"tree_mask": TREE, "causal": False}, ValueError, "tree_mask is given, but causal"),
        ({"tree_mask": TREE.astype(np.int64)}, TypeError, "tree_mask is int64"),
        ({"tree_mask": TREE[..., 0]}, ValueError, "tree_mask has shape"),
        ({"tree_mask": TREE[:1]}, ValueError, "tree_mask has shape"),
        ({"tree_mask": np.zeros((2, 2, 2), np.int32)}, ValueError, "tree_mask has shape"),
        ({"window": 0}, ValueError, "window is 0"),
        ({"window": 1.5}, TypeError, "window is float"),
        ({"window": True}, TypeError, "window is bool"),
        ({"sink": np.zeros(TINY.N)}, TypeError, "sink is float64"),
        ({"sink": np.zeros(TINY.N + 1, np.float32)}, ValueError, "sink has shape"),
        ({"sink": np.zeros((1, TINY.N), np.float32)}, ValueError, "sink has shape"),
        ({"sink": np.zeros(2 * TINY.N, np.float32)[::2]}, ValueError, "sink has a last axis"),
        ({"sink": 0.5}, TypeError, "sink is float"),
        ({"num_splits": 0}, ValueError, "num_splits is 0"),
        ({"num_splits": 1.0}, TypeError, "num_splits is float"),
        ({"softmax_scale": 0.0}, ValueError, "softmax_scale is 0.0"),
        ({"softmax_scale": np.nan}, ValueError, "softmax_scale"),
        ({"softmax_scale": None}, TypeError, "softmax_scale is NoneType"),
        ({"causal": 1}, TypeError, "causal is int"),
        ({"deterministic": None}, TypeError, "deterministic is NoneType"),
        ({"return_key_mass": "yes"}, TypeError, "return_key_mass is str"),
        ({"return_lse": 0}, TypeError, "return_lse is int"),
        ({"return_lse": False}, ValueError, "out_lse is given"),
        ({"lse_base": "10"}, ValueError, "lse_base"),
        ({"lse_layout": "BSN"}, ValueError, "lse_layout"),
        ({"lse_layout": "TN"}, ValueError, "out_lse has shape"),
        ({"lse_layout": "BNS"}, ValueError, "out_lse has shape"),
        ({"out_dtype": "float64"}, TypeError, "out_dtype"),
        ({"out_dtype": "bfloat16"}, TypeError, "out is float32, expected bfloat16"),
        ({"out": poisoned(OUT, np.float64)}, TypeError, "out is float64"),
        ({"out": poisoned(OUT[1:])}, ValueError, "out has shape"),
        ({"out": poisoned((2, 2, TINY.N, E))}, ValueError, "out has shape"),
        ({"out": poisoned((2, 2, TINY.N, 2 * L))[..., ::2]}, ValueError, "out has a last axis"),
        ({"out": poisoned(OUT)[:, ::-1]}, ValueError, "out has strides"),
        ({"out": np.broadcast_to(np.float32(POISON), OUT)}, ValueError, "out"),
        ({"out": as_strided(ROOM, OUT, (960, 80, 160, 4))}, ValueError, "out has strides"),
        ({"out_lse": poisoned((4, TINY.N))}, ValueError, "out_lse has shape"),
        ({"out_lse": poisoned(LSE, bfloat16)}, TypeError, "out_lse is bfloat16"),
        ({"out_lse": poisoned(LSE)[::-1]}, ValueError, "out_lse has strides"),
        ({"key_mass": poisoned((2, 2, 6))}, ValueError, "key_mass has 6 keys"),
        ({"key_mass": poisoned((2, 3, 9))}, ValueError, "key_mass has shape"),
        ({"key_mass": poisoned((2, 9))}, ValueError, "key_mass has shape"),
        ({"key_mass": poisoned((2, 2, 9), np.float64)}, TypeError, "key_mass is float64"),
        ({"key_mass": poisoned((2, 2, 18))[..., ::2]}, ValueError, "key_mass has a last axis"),
        ({"out": GOOD["q"][..., :L]}, ValueError, "out shares memory with q"),
        ({"out": GOOD["cache"].reshape(-1)[:480].reshape(OUT)}, ValueError, "out shares.*cache"),
        ({"out_lse": GOOD["q"].reshape(-1)[:12].reshape(LSE)}, ValueError, "out_lse shares"),
        ({"key_mass": GOOD["q"].reshape(-1)[:36].reshape(2, 2, 9)}, ValueError, "key_mass shares"),
        (
            {"sink": ROOM[:3], "out_lse": shifted(2, LSE)},
            ValueError,
            "out_lse shares memory with sink",
        ),
        (
            {"out": shifted(0, OUT), "out_lse": shifted(479, LSE)},
            ValueError,
            "out shares memory with out_lse",
        ),
        (
            {"out": shifted(0, OUT), "key_mass": shifted(479, (2, 2, 9))},
            ValueError,
            "out shares memory with key_mass",
        ),
        ({"variant": "no such"}, ValueError, "no such"),
    ],
)
def test_bad_input_is_refused_by_name_and_nothing_is_written(change, error, names):
    given = {"out": poisoned(OUT), "out_lse": poisoned(LSE), "key_mass": poisoned((2, 2, 9))}
    if "indices" in change and "key_mass" not in change:
        given["key_mass"] = poisoned((2, 2, 5))
    arguments = {**GOOD, **given, **change}
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    before = {name: array.copy() for name, array in arrays.items()}
    with pytest.raises(error, match=names):
        decode_attention(**arguments)
    for name, array in arrays.items():
        np.testing.assert_array_equal(bits_of(array), bits_of(before[name]), err_msg=name)
