"""One call of a layer: its arguments, and how its parts get memory and run ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sandbox import arrays
from sandbox.kernels.linear import linear
from sandbox.layers.step import Step

if TYPE_CHECKING:
    from sandbox.kernels.op import Op
    from sandbox.layers.mla import MLALayer


@dataclass(frozen=True)
class Tokens:
    """New tokens as the projections leave them: nothing is rotated, nothing is in the cache.

    Attributes:
        q: `[T, N, P + R]`.
        kv_c: `[T, L]`, normalised; rows are strided.
        k_pe: `[T, R]`, rows are strided; None if `R` is 0.
        positions: int64 `[T]`, None without rotation.
        slot_mapping: int64 `[T]`.
    """

    q: Any
    kv_c: Any
    k_pe: Any
    positions: Any
    slot_mapping: Any

    def __getitem__(self, part: slice) -> Tokens:
        fields = (self.q, self.kv_c, self.k_pe, self.positions, self.slot_mapping)
        return Tokens(*(None if field is None else field[part] for field in fields))


@dataclass(frozen=True)
class Run:
    """A layer's call: adopted arguments, on the caller's device and stream."""

    layer: MLALayer
    kind: arrays.Kind
    hidden: Any
    given_positions: Any
    cache: Any
    step: Step | None
    cos_sin: Any

    @property
    def num_tokens(self) -> int:
        return 0 if self.step is None else self.step.num_tokens

    @property
    def positions(self) -> Any:
        """int64 `[T]` of the tokens, or None where nothing is rotated."""
        if self.cos_sin is None:
            return None
        given = self.step.positions if self.given_positions is None else self.given_positions
        return given[: self.num_tokens]

    @property
    def reading(self) -> dict[str, Any]:
        """What ops that read the cache are told of its rows."""
        return {"cache_format": self.layer.cache_format, "k_scale": self.layer.k_scale}

    @property
    def writing(self) -> dict[str, Any]:
        """What ops that write the cache are told of its rows, and of the rotation."""
        return {**self.reading, "tile_scale": self.layer.tile_scale, "cos_sin": self.cos_sin}

    def array(self, name: str, *shape: int, dtype: Any = None) -> Any:
        """The workspace's array `name`, of the layer's dtype unless another is asked for."""
        dtype = self.layer.dtype if dtype is None else dtype
        return self.layer.workspace.take(self.kind, name, shape, dtype)

    def op(self, op: Op, *args: Any, **kwargs: Any) -> Any:
        """Run an op with the variant that the layer was told to use."""
        return op(*args, variant=self.layer.variants.get(op.name, "auto"), **kwargs)

    def project(self, x: Any, weight: Any, out: Any, bias: Any = None) -> None:
        """`linear`; of itself NumPy's on a CPU, where the oracle's float64 takes long."""
        own = "blas" if self.kind.gpu is None else "auto"
        linear(x, weight, bias=bias, out=out, variant=self.layer.variants.get("linear", own))

    def beside(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Begin `work` on a second stream; what is returned brings its result to the caller's.

        A step of few tokens leaves most of a GPU idle; a larger one does the work when it is asked
        for, as a CPU does.
        """
        if self.kind.gpu is None or self.num_tokens >= self.layer.overlap_tokens:
            return work
        cuda = arrays.import_cupy().cuda
        current, side = cuda.get_current_stream(), self.layer.workspace.side_stream(self.kind.gpu)
        side.wait_event(current.record(cuda.Event(disable_timing=True)))
        with side:
            result = work()
            done = side.record(cuda.Event(disable_timing=True))

        def joined() -> Any:
            current.wait_event(done)
            return result

        return joined

    def stage(self, name: str) -> None:
        if self.layer.on_stage is not None:
            self.layer.on_stage(name)


def by_head(tokens: Any) -> Any:
    """`[T, N, W]` as `[N, T, W]`, a view, for a product a head."""
    return tokens.swapaxes(0, 1)
