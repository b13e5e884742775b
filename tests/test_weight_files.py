"""Weights read from safetensors files, and those stored as 8-bit codes with scales of blocks."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from test_weight_refusals import error
from test_weights import DIMS, FIELDS, held, part

from sandbox import MLADims
from sandbox.cache_formats.fp8 import E4M3
from sandbox.layers.weights import MLAWeights, random_weights

ROOT = Path(__file__).parent.parent
PREFIX = "model.layers.3.self_attn."
# Blocks of 128 end within the heads of ranks, rows and columns alike.
CODED = MLADims(6, 200, 136, 24, 8, 32, q_lora_rank=140)
INDEX = "model.safetensors.index.json"


def prefixed(state: dict, prefix: str = PREFIX) -> dict:
    return {prefix + name: array for name, array in state.items()}


def assert_parts(weights: MLAWeights, state: dict) -> None:
    """The weights are bit for bit the rank's parts of `state`."""
    rank, size = weights.tp_rank, weights.tp_size
    expected = {field for field, (name, _) in FIELDS.items() if name in state}
    assert set(held(weights)) == expected - ({"o_bias"} if rank else set())
    for field, array in held(weights).items():
        name, axis = FIELDS[field]
        wanted = part(state[name], axis, rank, size)
        assert (array.dtype, array.shape) == (wanted.dtype, wanted.shape), name
        assert array.tobytes() == wanted.tobytes(), name


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_file_of_numpys(tmp_path, dtype, size):
    state = random_weights(DIMS, dtype, bias=True)
    path = tmp_path / "layer.safetensors"
    save_file(prefixed(state) | {"lm_head.weight": np.zeros((3, 2))}, path)
    for rank in range(size):
        weights = MLAWeights.load(path, DIMS, prefix=PREFIX, tp_rank=rank, tp_size=size)
        assert_parts(weights, state)
        for array in held(weights).values():  # no more than the rank's part was read
            assert array.flags.c_contiguous
            base = array
            while isinstance(base.base, np.ndarray):
                base = base.base
            assert base.nbytes == array.nbytes


def test_a_file_of_torchs(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from safetensors.torch import save_file

    state = random_weights(DIMS, "bfloat16", output_gate=True)
    tensors = {
        name: torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        for name, array in state.items()
    }
    path = tmp_path / "layer.safetensors"
    save_file(tensors, path)
    assert_parts(MLAWeights.load(str(path), DIMS, output_gate=True), state)


@pytest.fixture
def sharded(tmp_path):
    """A checkpoint whose layer lies in two files; a third, of other layers, is not there."""
    state = random_weights(DIMS, "bfloat16", bias=True)
    names = sorted(state)
    shards = {"model-00001.safetensors": names[::2], "model-00002.safetensors": names[1::2]}
    weight_map = {"model.layers.4.self_attn.o_proj.weight": "model-00003.safetensors"}
    for file, held_names in shards.items():
        save_file(prefixed({name: state[name] for name in held_names}), tmp_path / file)
        weight_map |= {PREFIX + name: file for name in held_names}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (tmp_path / INDEX).write_text(json.dumps(index))
    return tmp_path, state


@pytest.mark.parametrize("named", ["", INDEX], ids=["folder", "index"])
def test_sharded_files(sharded, named):
    folder, state = sharded
    weights = MLAWeights.load(folder / named, DIMS, prefix=PREFIX, tp_rank=1, tp_size=2)
    assert_parts(weights, state)


def test_a_folder_without_an_index(sharded):
    folder, state = sharded
    (folder / INDEX).unlink()
    assert_parts(MLAWeights.load(folder, DIMS, prefix=PREFIX), state)
    save_file({PREFIX + "o_proj.bias": state["o_proj.bias"]}, folder / "model-00009.safetensors")
    message = error(ValueError, folder, prefix=PREFIX)
    assert message.startswith(f"{PREFIX}o_proj.bias is both in")
    assert "'model-00009.safetensors'" in message


class TestRefusals:
    def test_shards_that_are_not_there(self, sharded):
        folder, _ = sharded
        (folder / "model-00002.safetensors").unlink()
        assert "model-00002" in error(FileNotFoundError, folder, prefix=PREFIX)

    def test_shards_without_their_tensor(self, sharded):
        folder, state = sharded
        save_file({"other": state["o_proj.bias"]}, folder / "model-00002.safetensors")
        message = error(ValueError, folder, prefix=PREFIX)
        assert "is not in" in message
        assert "model-00002.safetensors" in message

    def test_paths(self, tmp_path):
        missing = error(FileNotFoundError, tmp_path / "none.safetensors")
        assert "none.safetensors', which does not exist" in missing
        assert "which has no tensors" in error(ValueError, tmp_path)
        pointer = tmp_path / "model.safetensors"
        pointer.write_text("version https://git-lfs.github.com/spec/v1\n")
        assert "is no safetensors file: " in error(ValueError, pointer)
        pickled = tmp_path / "model.bin"
        pickled.write_bytes(b"")
        assert "expected a .safetensors file, a folder of them" in error(ValueError, pickled)

    @pytest.mark.parametrize("content", ["{", "{}", "[]", '{"weight_map": 3}'])
    def test_indexes(self, tmp_path, content):
        (tmp_path / INDEX).write_text(content)
        assert "is no index: it has no weight_map" in error(ValueError, tmp_path)

    def test_dtypes(self, tmp_path):
        state = random_weights(DIMS)
        state["o_proj.weight"] = state["o_proj.weight"].astype(np.float64)
        save_file(state, tmp_path / "layer.safetensors")
        message = error(TypeError, tmp_path / "layer.safetensors")
        assert message == "o_proj.weight is float64, expected float32, float16 or bfloat16"


def coded_state(dtype=ml_dtypes.float8_e4m3fn) -> tuple[dict, dict]:
    """A state dict in which all projections are codes, and the bfloat16 one it stands for."""
    rng = np.random.default_rng(1)
    stored = random_weights(CODED, "bfloat16", bias=True)
    restored = dict(stored)
    for name in [name for name, array in stored.items() if array.ndim == 2]:
        shape = stored[name].shape
        codes = E4M3.encode(rng.standard_normal(shape, np.float32) * np.float32(100))
        scales = rng.uniform(1e-4, 2e-3, [-(-width // 128) for width in shape])
        scales = scales.astype(np.float32)
        stored |= {name: codes.view(dtype), f"{name}_scale_inv": scales}
        whole = np.kron(scales, np.ones((128, 128), np.float32))[: shape[0], : shape[1]]
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * whole
        restored[name] = values.astype(ml_dtypes.bfloat16)
    return stored, restored


class TestCodes:
    @pytest.mark.parametrize("size", [1, 2, 3])
    @pytest.mark.parametrize("dtype", [np.uint8, ml_dtypes.float8_e4m3fn])
    def test_mappings(self, size, dtype):
        stored, restored = coded_state(dtype)
        for rank in range(size):
            assert_parts(MLAWeights.load(stored, CODED, tp_rank=rank, tp_size=size), restored)

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_torch_and_its_files(self, tmp_path, size):
        torch = pytest.importorskip("torch", reason="torch is not installed")
        from safetensors.torch import save_file

        stored, restored = coded_state(np.uint8)
        tensors = {}
        for name, array in stored.items():
            bits = array.view(np.int16) if array.dtype == ml_dtypes.bfloat16 else array
            dtype = {2: torch.bfloat16, 1: torch.float8_e4m3fn, 4: torch.float32}[array.itemsize]
            tensors[PREFIX + name] = torch.from_numpy(bits).view(dtype)
        save_file(tensors, tmp_path / "codes.safetensors")
        for source in (tensors, tmp_path):
            for rank in range(size):
                options = {"prefix": PREFIX, "tp_rank": rank, "tp_size": size}
                assert_parts(MLAWeights.load(source, CODED, **options), restored)

    def test_uint8_in_files(self, tmp_path):
        stored, restored = coded_state(np.uint8)
        save_file(stored, tmp_path / "codes.safetensors")
        assert_parts(MLAWeights.load(tmp_path, CODED, tp_rank=1, tp_size=2), restored)

    def test_some_projections_may_be_codes(self):
        stored, restored = coded_state()
        stored["kv_b_proj.weight"] = restored["kv_b_proj.weight"]
        del stored["kv_b_proj.weight_scale_inv"]
        weights = MLAWeights.load(stored, CODED)
        assert_parts(weights, restored)
        assert weights.kv_b_proj.base is stored["kv_b_proj.weight"]

    def test_every_code(self):
        """NaN codes are NaN and the largest numbers stay what they are."""
        dims = replace(CODED, hidden_size=256, q_lora_rank=None)
        state = random_weights(dims, "bfloat16")
        codes = np.tile(np.arange(256, dtype=np.uint8), (dims.E, 1))
        scales = np.array([[1, 2], [0.5, 3e38]], np.float32)
        state |= {"kv_a_proj_with_mqa.weight": codes}
        state |= {"kv_a_proj_with_mqa.weight_scale_inv": scales}
        got = MLAWeights.load(state, dims).kv_a_proj.astype(np.float32)
        exact = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        assert np.isnan(got[:, [0x7F, 0xFF]]).all()
        assert (got[:128, :0x7F] == exact[:128, :0x7F]).all()
        assert (got[128:, :0x7F] == exact[128:, :0x7F] / 2).all()
        assert (got[:128, 0x80:0xFF] == exact[:128, 0x80:0xFF] * 2).all()
        assert got[128, 0xFE] == -np.inf

    def test_refusals(self):
        stored, restored = coded_state()
        scales = "q_b_proj.weight_scale_inv"

        def said(kind, **changed):
            return error(
                kind, stored | {n.replace("__", "."): a for n, a in changed.items()}, CODED
            )

        without = {name: array for name, array in stored.items() if name != scales}
        assert error(TypeError, without, CODED) == (
            f"q_b_proj.weight is float8_e4m3fn, codes without their scales, {scales}"
        )
        assert said(ValueError, q_b_proj__weight_scale_inv=stored[scales][:1]) == (
            f"{scales} has shape (1, 2), expected (2, 2): [ceil(out / 128), ceil(in / 128)]"
        )
        half = stored[scales].astype(ml_dtypes.bfloat16)
        message = said(TypeError, q_b_proj__weight_scale_inv=half)
        assert message == f"{scales} is bfloat16, expected float32"
        message = said(TypeError, q_b_proj__weight=restored["q_b_proj.weight"])
        assert message.startswith(f"q_b_proj.weight is bfloat16, but there is {scales}")
        e5m2 = stored["q_b_proj.weight"].view(ml_dtypes.float8_e5m2)
        assert said(TypeError, q_b_proj__weight=e5m2).startswith("q_b_proj.weight is float8_e5m2")
        norm = {"kv_a_layernorm.weight_scale_inv": np.ones(1, np.float32)}
        assert "unknown kv_a_layernorm.weight_scale_inv" in error(ValueError, stored | norm, CODED)

    def test_a_torch_dtype_that_comes_in_as_bytes_is_told_apart(self):
        torch = pytest.importorskip("torch", reason="torch is not installed")
        stored, _ = coded_state(np.uint8)
        stored["o_proj.weight"] = torch.from_numpy(stored["o_proj.weight"]).view(torch.float8_e5m2)
        message = error(TypeError, stored, CODED)
        assert message.startswith("o_proj.weight is float8_e5m2, but there is")


def test_files_need_no_torch(tmp_path):
    stored, restored = coded_state()
    path = tmp_path / "codes.safetensors"
    save_file(stored, path)
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['cupy'] = None\n"
        "from sandbox import MLADims\n"
        "from sandbox.layers.weights import MLAWeights\n"
        f"weights = MLAWeights.load({str(path)!r}, {CODED!r}, tp_rank=1, tp_size=2)\n"
        "sys.stdout.buffer.write(weights.o_proj.tobytes())\n"
    )
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr.decode()
    assert run.stdout == part(restored["o_proj.weight"], 1, 1, 2).tobytes()
