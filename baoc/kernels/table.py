"""The table of a fused step: where the tensors are and what their settings are, so that one launch steps them all.

Built once per bucket; from then on a step costs the host a comparison of gradient addresses and one small copy.
"""

from collections.abc import Mapping, Sequence
from math import log

import torch
from torch import Tensor

from baoc.kernels.kinds import GROUP, Cut, Kind, Options
from baoc.kernels.upload import Upload

WIDTH = 8
_ADDRESSES = ("", "m", "m.scale", "v", "v.scale", "correction")  # columns; "" is the parameter
_LION_DECAY = 0.99  # as baoc.rules.sign
_LOG8V_RATIO = 2.0 ** (2 * 20.0 / 254)  # of v between two codes
_DTYPES = (torch.float32, torch.bfloat16)


def fits(param: Tensor) -> bool:
    """True if the kernel can step this parameter: contiguous fp32 or bf16. Others take the eager path."""
    return param.dtype in _DTYPES and param.is_contiguous() and not param.is_sparse


class FusedTable:
    """All tensors of one kind on one device, in order.

    `states[i]` is the state dict of `params[i]`: "m", "m.scale", "v", "v.scale", "correction", "step", as far as the
    kind has them; it is stepped in place, and kept alive: whoever replaces a state tensor or moves a parameter's data
    has to drop the table and build another. `groups[i]` indexes the settings given to each step (all 0 if left out).

    `steps` (fp32 [tensors], CPU) counts the steps of each tensor from where `states[i]["step"]` stood. To have state
    and table agree at no cost, put its elements back: `state["step"] = table.steps[i]`; changes made through such a
    view are noticed.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        *,
        kind: Kind,
        states: Sequence[Mapping[str, Tensor]],
        groups: Sequence[int] | None = None,
        cut: Cut | None = None,
    ):
        self.kind, self.params = kind, list(params)
        self.device, self.dtype = self.params[0].device, self.params[0].dtype
        self.cut = cut or default_cut(kind, self.dtype)
        self.groups = list(groups) if groups is not None else [0] * len(self.params)
        self._check(states)
        self.aligned = True  # all tensors and gradients to the vector that the cut asks for
        self.grads_aligned = True
        self.grad_dtype = self.dtype
        self._lay_out(states)
        self._alive = [state[key] for state in states for key in kind.keys]
        self.steps = torch.tensor(
            [float(state["step"]) if "step" in state else 0.0 for state in states], dtype=torch.float32, device="cpu"
        )
        num = len(self.params)
        self._settings = Upload(num * WIDTH + 2 * GROUP, dtype=torch.float32, device=self.device)
        self._grads = Upload(num, dtype=torch.int64, device=self.device)
        self._seen: list[int] | None = None
        self._strided: list[int] = []
        self._copies: list[Tensor | None] = []
        self._active = torch.zeros(num, dtype=torch.float32, device="cpu")
        self._version = -1
        self._classes: list[list[int]] = []  # [group, step, active] of every distinct setting
        self._class_of = torch.zeros(num, dtype=torch.int64, device="cpu")

    def _check(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        widths = self.kind.keys
        for index, (param, state) in enumerate(zip(self.params, states, strict=True)):
            if not fits(param) or param.dtype is not self.dtype or param.device != self.device:
                raise ValueError(
                    f"tensor {index} is {param.dtype} on {param.device} with strides {param.stride()}: a table takes "
                    f"contiguous {self.dtype} tensors on {self.device}; step others with the eager backend"
                )
            for key, width in widths.items():
                kept = state[key]
                numel = -(-param.numel() // GROUP) if key.endswith(".scale") else param.numel()
                if kept.numel() != numel or kept.element_size() != width or not kept.is_contiguous():
                    raise ValueError(
                        f"state {key} of tensor {index} is {kept.dtype} of shape {tuple(kept.shape)} and strides "
                        f"{kept.stride()}: {self.kind} needs {numel} contiguous elements of {width} byte(s)"
                    )

    def _lay_out(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Chunks and addresses, on the device."""
        numels = torch.tensor([p.numel() for p in self.params], dtype=torch.int64, device="cpu")
        chunks = (numels + self.cut.chunk - 1) // self.cut.chunk
        first = torch.zeros(len(self.params) + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(chunks, 0, out=first[1:])
        self.num_chunks = int(first[-1])
        owner = torch.repeat_interleave(torch.arange(len(self.params), dtype=torch.int32, device="cpu"), chunks)
        rows = []
        for param, state in zip(self.params, states, strict=True):
            tensors = [param if not key else state[key] if key in self.kind.keys else None for key in _ADDRESSES]
            rows.append([0 if t is None else t.data_ptr() for t in tensors] + [0] * (WIDTH - len(tensors)))
            self.aligned &= all(self._is_aligned(t.data_ptr(), t.element_size()) for t in tensors if t is not None)
        self.chunk_tensor = owner.to(self.device)
        self.first_chunk = first.to(torch.int32).to(self.device)
        self.numels = numels.to(self.device)
        self.ptrs = torch.tensor(rows, dtype=torch.int64, device="cpu").to(self.device)
        self.no_masks = torch.zeros(len(self.params), dtype=torch.int64, device=self.device)
        self.ones = torch.ones(len(self.params), dtype=torch.float32, device=self.device)
        self.partial = torch.zeros(max(self.num_chunks, 1), dtype=torch.float32, device=self.device)
        self.num_bad = torch.zeros(len(self.params), dtype=torch.int32, device=self.device)

    def _is_aligned(self, address: int, size: int) -> bool:
        return address % (self.cut.vector * size) == 0

    @property
    def nbytes(self) -> int:
        """Device bytes that the table holds beyond the optimizer's state."""
        held = (self.chunk_tensor, self.first_chunk, self.numels, self.ptrs, self.no_masks, self.ones, self.partial)
        own = (self.num_bad, self._settings.device, self._grads.device)
        return sum(t.numel() * t.element_size() for t in (*held, *own))

    @property
    def needs_thresholds(self) -> bool:
        """True if something is rounded by the codecs' lanes: v unless fp32, and the correction of split weights."""
        return self.kind.weights == "split8" or (self.kind.traits.has_v and self.kind.v != "fp32")

    @property
    def settings(self) -> Tensor:
        return self._settings.device

    @property
    def thresholds(self) -> Tensor:
        return self._settings.device[-2 * GROUP :]

    @property
    def grad_ptrs(self) -> Tensor:
        return self._grads.device

    def refresh(self) -> None:
        """Takes note of where the gradients are; copies their addresses to the device if any moved."""
        grads = [param.grad for param in self.params]
        seen = [-1 if grad is None else grad.data_ptr() for grad in grads]
        if seen != self._seen:
            self._notice(grads)
            self._seen = seen
        elif not self._strided:
            return
        self._copies = [grads[i].contiguous() for i in self._strided]  # pyright: ignore[reportOptionalMemberAccess]
        addresses = [max(address, 0) for address in seen]
        for index, copy in zip(self._strided, self._copies, strict=True):
            addresses[index] = copy.data_ptr()  # pyright: ignore[reportOptionalMemberAccess]
        size = 4 if self.grad_dtype is torch.float32 else 2
        self.grads_aligned = all(self._is_aligned(address, size) for address in addresses)
        self._grads.host().copy_(torch.tensor(addresses, dtype=torch.int64, device="cpu"))
        self._grads.send()

    def _notice(self, grads: Sequence[Tensor | None]) -> None:
        """Gradients that were not there before: their type, layout, and who has one."""
        dtypes = {grad.dtype for grad in grads if grad is not None}
        if len(dtypes) > 1 or not dtypes <= {self.dtype, torch.float32}:
            raise ValueError(
                f"gradients are {sorted(map(str, dtypes))} for {self.dtype} parameters: the fused step takes one type "
                "for all, that of the parameters or float32; use the eager backend"
            )
        self.grad_dtype = next(iter(dtypes), self.dtype)
        self._strided = [i for i, grad in enumerate(grads) if grad is not None and not grad.is_contiguous()]
        active = torch.tensor([float(grad is not None) for grad in grads], dtype=torch.float32, device="cpu")
        if not torch.equal(active, self._active):
            self._active = active
            self._version = -1

    def _classify(self) -> None:
        """Groups tensors by parameter group, step and whether they have a gradient: few rows serve all."""
        counted = self.kind.traits.counts_steps
        keys = [
            (group, int(step) if counted else 0, int(active))
            for group, step, active in zip(self.groups, self.steps.tolist(), self._active.tolist(), strict=True)
        ]
        distinct = {key: index for index, key in enumerate(dict.fromkeys(keys))}
        self._classes = [list(key) for key in distinct]
        self._class_of = torch.tensor([distinct[key] for key in keys], dtype=torch.int64, device="cpu")

    def stage(self, options: Sequence[Options], *, thresholds: Tensor | None, advance: bool = True) -> None:
        """Sends the settings of the coming step. `thresholds`: fp32 [32] on the CPU, see `needs_thresholds`."""
        if self.steps._version != self._version:
            self._classify()
        if thresholds is None and self.needs_thresholds:
            raise ValueError(f"{self.kind} rounds by thresholds: pass those of this step's phase")
        rows = [self._row(options[group], step=step + 1) for group, step, _ in self._classes]
        host = self._settings.host()
        settings = host[: -2 * GROUP].view(-1, WIDTH)
        if len(rows) == 1:
            settings.copy_(torch.tensor(rows[0], dtype=torch.float32, device="cpu"))
        else:
            table = torch.tensor(rows, dtype=torch.float32, device="cpu")
            torch.index_select(table, 0, self._class_of, out=settings)
        if thresholds is not None and self.needs_thresholds:
            host[-2 * GROUP : -GROUP].copy_(thresholds)
            if self.kind.v == "log8v":
                thresholds = torch.log1p(thresholds * (_LOG8V_RATIO - 1)) / log(_LOG8V_RATIO)
            host[-GROUP:].copy_(thresholds)
        self._settings.send()
        if advance and self.kind.traits.counts_steps:
            self.steps.add_(self._active)
            for row in self._classes:
                row[1] += row[2]
        self._version = self.steps._version

    def _row(self, options: Options, *, step: int) -> list[float]:
        (beta1, beta2), rule = options.betas, self.kind.rule
        counted = self.kind.traits.counts_steps
        divisor = 1 - beta1**step if rule == "adamw" else 1.0
        second = 1 - min(beta2, _LION_DECAY) if rule == "lion" else 1 - beta2
        inv_bc2 = (1 - beta2**step) ** -0.5 if counted else 1.0
        decay = 1 - options.lr * options.weight_decay
        return [decay, options.lr / divisor, 1 - beta1, beta2, second, inv_bc2, options.eps, 0.0]


def default_cut(kind: Kind, dtype: torch.dtype) -> Cut:
    """The cut that did best on an H100; see experiments/benchmarks/optimizer_step.py."""
    fp32 = dtype is torch.float32 or "fp32" in [kind.m] * kind.traits.has_m + [kind.v] * kind.traits.has_v
    return Cut(vector=4 if fp32 else 8)
