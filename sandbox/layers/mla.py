"""The MLA layer: hidden states in, hidden states out, over a paged latent cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.cache_formats import format_by_name
from sandbox.dims import MLADims
from sandbox.kernels import require
from sandbox.kernels.attention import checks as attention_checks
from sandbox.kernels.rms_norm import rms_norm
from sandbox.layers import checks, output
from sandbox.layers.collectives import Alone, Collective
from sandbox.layers.decode import decode
from sandbox.layers.model_config import NORM_EPS
from sandbox.layers.prefill import prefill
from sandbox.layers.prepare import prepare
from sandbox.layers.rope import Rope, half_split_to_interleaved
from sandbox.layers.run import Run, Tokens
from sandbox.layers.step import Step
from sandbox.layers.weights import MLAWeights
from sandbox.layers.workspace import Workspace
from sandbox.planner import ContextParallel, Plan


class MLALayer:
    """Multi-head Latent Attention of one model layer on one rank.

    Prefills attend over full heads, in chunks of context; decodes over the latent itself, with the
    up-projections absorbed into query and output. Tokens of decodes come first in a batch: a plan
    reorders requests, and `hidden[plan.order.tokens(query_lens)]` follows it. No gradients.

    Args:
        dims: of the whole model.
        weights: `MLAWeights`, or what `MLAWeights.load` takes: a torch module or state dict, or any
            mapping with Hugging Face's names, or safetensors files.
        prefix: of the layer's names in what is loaded, such as `model.layers.3.self_attn`.
        cache_format: name of the cache's format; None is the plain one of the weights' dtype.
        k_scale: descale of `fp8_e4m3` and `fp8_e5m2` caches, a number or an array of one element,
            which may change between replays of a graph.
        tile_scale: rule for the tile scales of `fp8_ds_mla`.
        rope: the rotation, or None for a model without one (`dims.rope` False, or `R` 0).
        softmax_scale: of the scores; None is `(P + R) ** -0.5` times the rope's `softmax_factor`.
        eps: of both RMS norms.
        output_gate: whether `attention * sigmoid(g_proj(hidden))` goes into the output projection.
        overlap_tokens: steps of fewer tokens compute the gate's product and the new latents on a
            second stream, beside the queries.
        output_quant: how the output of attention is quantized before the output projection, a name
            in `output.QUANTS`; `attention` returns codes and scales then, and the output projection
            takes the restored values. None is not at all.
        output_scale: descale for `fp8_static`, global scale for `nvfp4`; a number or an array of
            one element.
        prefill_descales: of q, k and v; prefills then attend with E4M3 codes.
        decode_q_descale: of the queries; decodes then attend with E4M3 queries.
        deterministic: attention of decodes whose bits do not depend on the rest of the batch; those
            of the products before and after may.
        variants: names of ops and of the variants to run them with; the others choose for
            themselves.
        tp_rank, tp_size: which heads are this rank's. The ranks' results sum to the whole.
        context_parallel: how contexts are spread over the ranks of `collective`.
        collective: how these ranks talk; None is a rank alone.
        cp_heads: `"sharded"` if each rank of `collective` has heads of its own, `"replicated"` if
            all have the same, so the same `tp_rank`; None is by `tp_size`.
        cp_combine: `"all_to_all"` or `"reduce_scatter"`: how sharded heads are brought together.
        workspace: memory for intermediate arrays, to be shared with other layers; None is its own.

    Attributes:
        w_uk, w_uv: `[N, P, L]` and `[N, V, L]`, the halves of `kv_b_proj` that decodes absorb.
        on_stage: None, or called with a stage's name when the stage begins to be queued, for
            timing; it must not call a layer with the same workspace.

    Raises:
        TypeError, ValueError: weights that are missing, unknown or misshapen, or arguments that do
            not go together.
    """

    def __init__(
        self,
        dims: MLADims,
        weights: Any,
        *,
        prefix: str = "",
        cache_format: str | None = None,
        k_scale: Any = None,
        tile_scale: str | None = None,
        rope: Rope | None = None,
        softmax_scale: float | None = None,
        eps: float = NORM_EPS,
        output_gate: bool = False,
        overlap_tokens: int = 512,
        output_quant: str | None = None,
        output_scale: Any = None,
        prefill_descales: tuple[Any, Any, Any] | None = None,
        decode_q_descale: Any = None,
        deterministic: bool = False,
        variants: Mapping[str, str] | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        context_parallel: ContextParallel | None = None,
        collective: Collective | None = None,
        cp_heads: str | None = None,
        cp_combine: str = "all_to_all",
        workspace: Workspace | None = None,
    ) -> None:
        if not isinstance(weights, MLAWeights):
            weights = MLAWeights.load(
                weights, dims, prefix=prefix, output_gate=output_gate,
                tp_rank=tp_rank, tp_size=tp_size,
            )  # fmt: skip
        checks.weights(weights, dims, output_gate, tp_rank, tp_size)
        checks.rope(rope, dims)
        self.dims, self.dtype = weights.dims, weights.dtype
        self.weights = _interleaved(weights, rope)
        self.w_uk, self.w_uv = self.weights.w_uk, self.weights.w_uv
        self.rope = rope
        if softmax_scale is None:
            softmax_scale = dims.softmax_scale * (rope.softmax_factor if rope else 1.0)
        self.softmax_scale = attention_checks.softmax_scale(softmax_scale)
        self.eps = require.not_negative(eps, "eps")
        self.cache_format = checks.cache_format(cache_format, self.dims, self.dtype)
        format_by_name(self.cache_format).check_scales(k_scale, tile_scale)
        self.k_scale, self.tile_scale = checks.scale(k_scale, "k_scale"), tile_scale
        self.output_gate = output_gate
        self.overlap_tokens = require.integer(overlap_tokens, "overlap_tokens")
        self.output_quant = output.checked(output_quant, output_scale, self.dims)
        self.output_scale = checks.scale(output_scale, "output_scale")
        self.prefill_descales = checks.descales(prefill_descales)
        self.decode_q_descale = checks.scale(decode_q_descale, "decode_q_descale")
        require.flag(deterministic, "deterministic")
        self.deterministic = deterministic
        self.variants = checks.variants(variants or {})
        self.context_parallel, self.collective = context_parallel, collective or Alone()
        checks.ranks(context_parallel, self.collective)
        if cp_heads is None:
            cp_heads = "sharded" if tp_size > 1 else "replicated"
        self.cp_heads = cp_heads
        require.one_of(self.cp_heads, "cp_heads", ("sharded", "replicated"))
        self.cp_combine = cp_combine
        require.one_of(cp_combine, "cp_combine", ("all_to_all", "reduce_scatter"))
        self.workspace = Workspace() if workspace is None else workspace
        if not isinstance(self.workspace, Workspace):
            raise TypeError(f"workspace is {type(workspace).__name__}, expected a Workspace")
        self.on_stage: Callable[[str], None] | None = None

    def __repr__(self) -> str:
        shown = [f"{self.dims}", f"{self.dtype} weights", f"cache {self.cache_format}"]
        if self.weights.tp_size > 1:
            shown.append(f"rank {self.weights.tp_rank} of {self.weights.tp_size}")
        if self.context_parallel:
            shown.append(f"{self.context_parallel}, rank {self.collective.rank}")
        if self.variants:
            shown.append(", ".join(f"{op}={variant}" for op, variant in self.variants.items()))
        return f"MLALayer({'; '.join(shown)})"

    def __call__(
        self, hidden: Any, positions: Any, cache: Any, plan: Plan | Step | None, *, out: Any = None
    ) -> Any:
        """The layer's output for a batch of new tokens, whose rows go into the cache.

        Args:
            hidden: `[T, H]` of the weights' dtype, decodes first; NumPy, CuPy, torch or anything
                else that speaks DLPack. Rows behind the plan's tokens are padding.
            positions: int64 `[>= num_tokens]`; None takes the plan's.
            cache: `[num_blocks, block_size, row]` of the layer's format; written in place.
            plan: of `plan_step`, or what `prepare` made of it, which serves all layers of a step;
                None computes nothing.
            out: `[T, H]` of hidden's dtype, contiguous rows; None allocates.

        Returns:
            `[T, H]` of the caller's kind: a rank's part of the sum with tensor parallelism. 0 for
            padding, and everywhere without a plan.

        Raises:
            TypeError, ValueError: an argument is of the wrong kind, dtype or shape.
        """
        given = {"hidden": hidden, "positions": positions, "cache": cache, "out": out}
        with arrays.borrow(given) as borrowed, self.workspace.in_use():
            run = self._begin(borrowed, plan)
            layout = (run.hidden.shape[0], self.dims.H), self.dtype
            result, owner = _result(borrowed, "out", layout, "cache")
            if run.num_tokens:
                attended = run.array("attended", run.num_tokens, self.dims.N * self.dims.V)
                self._attend(run, attended)
                output.project(run, attended, result[: run.num_tokens])
            result[run.num_tokens :] = 0
            return borrowed.returned("out", result, owner)

    def attention(
        self, hidden: Any, positions: Any, cache: Any, plan: Plan | Step | None, *, out: Any = None
    ) -> Any | output.Quantized:
        """As a call, but without the output projection: `[T, N * V]`, gated if the layer is.

        With `output_quant` an `output.Quantized`: codes and scales, as a quantized `o_proj` takes
        them.

        Args:
            out: `[T, N * V]` of hidden's dtype, or with `output_quant` what an earlier call with as
                many tokens returned, whose arrays are written again. Apart from hidden and cache.
                None allocates.
        """
        given = {"hidden": hidden, "positions": positions, "cache": cache}
        outputs = output.given(self, out)
        with arrays.borrow({**given, **outputs}) as borrowed, self.workspace.in_use():
            run = self._begin(borrowed, plan)
            tokens = run.hidden.shape[0]
            layouts = output.layouts(self, tokens)
            pairs = {
                name: _result(borrowed, name, layout, "hidden", "cache", *(layouts.keys() - {name}))
                for name, layout in layouts.items()
            }
            results = {name: result for name, (result, _) in pairs.items()}
            attended = results.get("out")
            if attended is None:
                attended = run.array("attended", tokens, self.dims.N * self.dims.V)
            if run.num_tokens:
                self._attend(run, attended[: run.num_tokens])
            attended[run.num_tokens :] = 0
            if self.output_quant is not None:
                output.quantize(run, attended, results)
            found = {name: borrowed.returned(name, *pair) for name, pair in pairs.items()}
            return output.attended(self, found)

    def _begin(self, borrowed: arrays.Borrowed, plan: Plan | Step | None) -> Run:
        """Check a call's arguments; nothing is launched, but a plan may be moved to the device."""
        given = borrowed.arrays
        hidden, cache, positions = given["hidden"], given["cache"], given["positions"]
        checks.call(self, borrowed.kind, hidden)
        if isinstance(plan, Plan):
            plan = prepare(plan, like=hidden)
        if plan is not None:
            checks.step(self, plan, hidden, cache, positions)
            format_by_name(self.cache_format).check_float8(borrowed.original("cache"), "cache")
            borrowed.require_writeable("cache")
        table = None if self.rope is None else self.rope.table(borrowed.kind)
        return Run(self, borrowed.kind, hidden, positions, cache, plan, table)

    def _attend(self, run: Run, out: Any) -> None:
        """Attention of all tokens of the step, gated: out `[T, N * V]`."""
        latent = run.beside(lambda: self._latent(run))
        gate = output.start_gate(run) if self.output_gate else None
        q = self._queries(run)
        kv_c, k_pe = latent()
        new = Tokens(q, kv_c, k_pe, run.positions, run.step.slot_mapping)
        heads = out.reshape(len(out), self.dims.N, self.dims.V)
        step, first = run.step, 0
        if step.decode is not None:
            first = step.decode.tokens
            decode(run, step.decode, new[:first], heads[:first])
        if step.prefill is not None:
            prefill(run, step.prefill, new[first:], heads[first:])
        if gate is not None:
            output.apply_gate(run, gate, out)

    def _queries(self, run: Run) -> Any:
        """`[T, N, P + R]`, not rotated."""
        dims, weights, tokens = self.dims, self.weights, run.num_tokens
        run.stage("projections")
        source, weight = run.hidden[:tokens], weights.q_proj
        if dims.q_lora_rank is not None:
            q_c = run.array("q_c", tokens, dims.q_lora_rank)
            run.project(source, weights.q_a_proj, q_c, weights.q_a_bias)
            run.stage("norm")
            run.op(rms_norm, q_c, weights.q_a_layernorm, eps=self.eps, out=q_c)
            run.stage("projections")
            source, weight = q_c, weights.q_b_proj
        q = run.array("q", tokens, dims.N * dims.qk_head_dim)
        run.project(source, weight, q)
        return q.reshape(tokens, dims.N, dims.qk_head_dim)

    def _latent(self, run: Run) -> tuple[Any, Any]:
        """`kv_c` `[T, L]`, normalised, and `k_pe` `[T, R]`, not rotated; None if `R` is 0."""
        dims, weights, tokens = self.dims, self.weights, run.num_tokens
        run.stage("projections")
        latent = run.array("kv_a", tokens, dims.E)
        run.project(run.hidden[:tokens], weights.kv_a_proj, latent, weights.kv_a_bias)
        kv_c = latent[:, : dims.L]
        run.stage("norm")
        run.op(rms_norm, kv_c, weights.kv_a_layernorm, eps=self.eps, out=kv_c)
        return kv_c, latent[:, dims.L :] if dims.R else None


def _result(
    borrowed: arrays.Borrowed, name: str, layout: tuple[tuple[int, int], Any], *others: str
) -> tuple[Any, Any]:
    """An array to write and the caller's object over it, apart from the other arguments named."""
    shape, dtype = layout
    found = borrowed.arrays[name]
    if found is None:
        return borrowed.kind.empty(shape, dtype)
    require.output(found, name, shape, np.dtype(dtype))
    require.apart({name: found}, {other: borrowed.arrays[other] for other in others})
    borrowed.require_writeable(name)
    return found, borrowed.original(name)


def _interleaved(weights: MLAWeights, given: Rope | None) -> MLAWeights:
    """Weights whose rotated columns stand in pairs (2i, 2i + 1), as the kernels rotate them.

    Those of a half-split model are copied in that order: q and k alike, so that scores stay.
    """
    if given is None or given.interleaved:
        return weights
    dims = weights.dims
    order = half_split_to_interleaved(dims.R)
    head = np.concatenate([np.arange(dims.P), dims.P + order])
    heads = (np.arange(dims.N)[:, None] * dims.qk_head_dim + head).reshape(-1)
    latent = np.concatenate([np.arange(dims.L), dims.L + order])
    q_name = "q_proj" if dims.q_lora_rank is None else "q_b_proj"
    moved = {q_name: heads, "kv_a_proj": latent, "kv_a_bias": latent}
    return replace(
        weights,
        **{
            name: getattr(weights, name)[arrays.namespace(weights.o_proj).asarray(rows)]
            for name, rows in moved.items()
            if getattr(weights, name) is not None
        },
    )
