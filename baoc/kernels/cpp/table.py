"""Steps all tensors of one kind by one call of the C++ library, which reads a table of their addresses.

The table takes addresses of parameters and states once, those of gradients before each step.
"""

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baoc.kernels.cpp.build import library

RULES = ("adamw", "rmsprop", "lion", "signum", "sign", "adamw_shared_in", "adamw_shared_out", "foam")
CODECS = ("fp32", "bf16", "softsign8", "sqrt8", "root8m", "root8v", "root4", "lattice4")
WEIGHTS = ("fp32", "bf16", "split8", "bf16_sr")
THRESHOLDS = 2 * 5 * 32  # fp32 values: thresholds of a group, lattice4's for k = 0 ... 3; then the same for one half
_WIDTH = 16
_PARAM, _GRAD, _FINITE, _M, _M_SCALE, _V, _V_SCALE, _CORRECTION, _NUMEL, _ROWS, _COLS, _FIRST, _DEN, _NOISE, _BYTES = (
    range(15)
)
_COLUMNS = {"m": _M, "m.scale": _M_SCALE, "v": _V, "v.scale": _V_SCALE, "correction": _CORRECTION}
_NOISE_PER_STEP = 0x85EBCA77  # as baoc.optim.weights.random_bits


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeKind:
    """Rule, codecs of m and v, and weight format of a table, by the names listed above.

    `fold`: parameter elements per state element of FOAM."""

    rule: str
    m: str = "fp32"
    v: str = "fp32"
    weights: str = "fp32"
    fold: int = 1


class _Job(ctypes.Structure):
    """The `Job` of job.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("rule", "m", "v", "weights", "store", "keep_update", "fold", "threads")),
        *((name, ctypes.c_int64) for name in ("num_tensors", "num_chunks")),
        *((name, ctypes.c_void_p) for name in ("tensors", "settings", "thresholds", "den", "sums", "counts")),
    )


class NativeTable:
    """The addresses of contiguous CPU parameters and their states. Build a new table when a tensor is replaced.

    Args:
        states: for each parameter, the tensors of its state by name.
        shapes: for each parameter, (rows, cols) as stored.
        seeds: for each parameter, the seed of stochastic rounding.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        *,
        kind: NativeKind,
        states: Sequence[Mapping[str, Tensor]],
        shapes: Sequence[tuple[int, int]],
        seeds: Sequence[int],
    ):
        self.kind, self.params = kind, list(params)
        self._library = library()
        self._alive = [state[key] for state in states for key in _COLUMNS if key in state]
        self._rows = array("q", bytes(8 * _WIDTH * len(params)))
        chunk, first, den = self._library.baoc_chunk(kind.fold), 0, 0
        for index, (param, state, (rows, cols)) in enumerate(zip(params, states, shapes, strict=True)):
            row = [0] * _WIDTH
            row[_PARAM], row[_NUMEL], row[_ROWS], row[_COLS] = param.data_ptr(), param.numel(), rows, cols
            row[_FIRST], row[_DEN] = first, den
            for key, column in _COLUMNS.items():
                row[column] = state[key].data_ptr() if key in state else 0
            self._rows[index * _WIDTH : (index + 1) * _WIDTH] = array("q", row)
            numel = state["m"].numel() if kind.fold > 1 else param.numel()
            first += -(-numel // chunk)
            den += state["v"].numel() if kind.rule.startswith("adamw_shared") else 0
        self.num_chunks, self._seeds = first, list(seeds)
        self._den = array("f", bytes(4 * den))
        self._sums, self._counts = array("d", bytes(8 * len(params))), array("q", bytes(8 * len(params)))
        self._copies: list[Tensor] = []

    @property
    def moved(self) -> bool:
        """True if the storage of a parameter has another address than when the table was made."""
        return self._rows[_PARAM::_WIDTH] != array("q", [param.data_ptr() for param in self.params])

    def refresh(self, masks: Mapping[Tensor, Tensor]) -> list[bool]:
        """Reads the addresses of the gradients and of their `masks` (True where finite).

        Returns for each parameter whether it has a gradient. Gradients that the library cannot read are copied.
        """
        grads, addresses, sizes = [param.grad for param in self.params], [], []
        self._copies = []
        for grad in grads:
            if grad is not None and not (grad.is_contiguous() and grad.dtype in (torch.float32, torch.bfloat16)):
                grad = grad.to(torch.bfloat16 if grad.dtype is torch.bfloat16 else torch.float32).contiguous()
                self._copies.append(grad)
            addresses.append(0 if grad is None else grad.data_ptr())
            sizes.append(0 if grad is None else grad.element_size())
        finite = [0] * len(grads)
        if masks:
            for index, param in enumerate(self.params):
                if param in masks:
                    self._copies.append(masks[param].contiguous())
                    finite[index] = self._copies[-1].data_ptr()
        for column, numbers in ((_GRAD, addresses), (_BYTES, sizes), (_FINITE, finite)):
            self._rows[column::_WIDTH] = array("q", numbers)
        return [grad is not None for grad in grads]

    def run(
        self,
        settings: Sequence[tuple[float, ...]],
        *,
        thresholds: Tensor,
        phase: int,
        keep_update: bool,
        store: bool = True,
    ) -> tuple[list[float], list[int]]:
        """Steps the tensors that have gradients.

        Args:
            settings: decay, size, w1, b2, w2, bc2 and eps of each tensor: p <- decay p + size update; w1 and w2 weigh
                the gradient in m and v, b2 is what v keeps, bc2 divides its root. Lion's w2 is its second decay of m.
            thresholds: fp32 [THRESHOLDS], of the codecs' dithered rounding in this step.
            phase: the step's number, for stochastic rounding.
            keep_update: compute the update on its own before adding it, as torch does, and sum its squares.
            store: False leaves parameters and states as they are.

        Returns:
            For each tensor, the sum of squares of the update and the number of elements in it.
        """
        noise = phase * _NOISE_PER_STEP
        if self.kind.weights == "bf16_sr":
            self._rows[_NOISE::_WIDTH] = array("q", [(seed + noise) % 2**32 for seed in self._seeds])
        rows = array("f", [number for row in settings for number in (*row, 0.0)])
        kind = self.kind
        job = _Job(
            rule=RULES.index(kind.rule), m=CODECS.index(kind.m), v=CODECS.index(kind.v),
            weights=WEIGHTS.index(kind.weights), store=store, keep_update=keep_update, fold=kind.fold,
            threads=torch.get_num_threads(), num_tensors=len(self.params),
            num_chunks=self.num_chunks, tensors=_address(self._rows), settings=_address(rows),
            thresholds=thresholds.data_ptr(), den=_address(self._den),
            sums=_address(self._sums), counts=_address(self._counts),
        )  # fmt: skip
        self._library.baoc_step(ctypes.byref(job))
        self._copies = self._copies if not store else []
        return self._sums.tolist(), self._counts.tolist()


def _address(numbers: "array[int] | array[float]") -> int:
    return numbers.buffer_info()[0]
