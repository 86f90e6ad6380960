"""Kernels compile for an NVIDIA GPU (compute capability 9.0), which needs none, and move wide words without spilling.

The interpreter takes what the compiler does not: names of two types, masks that keep accesses narrow.
"""

import os
import subprocess
import sys

import pytest
import torch

from baoc.kernels import Call
from baoc.kernels.triton import engine
from baoc.kernels.triton.staging import Upload
from baoc.kernels.triton.table import KeptLaunches
from tests.support.fused_step import prepare
from tests.support.interpreting import INTERPRETING
from tests.support.kernel_cases import Case, Twin
from tests.support.matrix_cases import MatrixCase, MatrixTwin
from tests.support.paths import ROOT

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
SHAPES = ((64, 256, False), (40, 61, False), (40, 33, True))
# rule, storage, weights: among them every kernel, and every codec once
VARIANTS = [
    ("adamw", "int8", "split8"), ("adamw", "int4", "native"), ("lion", "int8_root", "bf16_sr"),
    ("adamw_shared_in", "int8", "native"), ("adamw_shared_out", "fp32", "split8"), ("adafactor", "fp32", "native"),
    ("adafactor_momentum", "int4", "native"), ("foam_l2", "int8_root", "native"), ("foam_l3", "bf16", "split8"),
    ("foam_l1", "int8", "split8"), ("muon", "int8", "split8"),
]  # fmt: skip
STEPPING = ("step_kernel", "apply_kernel", "foam_kernel")
AGAIN = [  # and which launches are kept: those of the stepping kernel, all, or none, as odd matrices are padded
    ("adamw", "fp32", "native", "all"), ("lion", "int8", "split8", "all"), ("adafactor", "fp32", "native", "stepping"),
    ("muon", "int8", "native", "all"), ("muon", "fp32", "native", "none"),
]  # fmt: skip
MOST_SPILLED = 400  # bytes of a thread's stack, mostly of what odd elements and transposed folds take


if INTERPRETING:

    @pytest.mark.slow
    def test_a_process_that_compiles():
        env = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
        assert f"{len(VARIANTS) + len(AGAIN) + 2} passed" in done.stdout, done.stdout[-500:]

else:

    @pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
    @pytest.mark.parametrize(("rule", "storage", "weights"), VARIANTS)
    def test_it_compiles(rule: str, storage: str, weights: str):
        from baoc.kernels.triton import elementwise, foam, matrix, means, muon, orthogonal
        from tests.support.kernel_compiling import recording

        dtype = FLOAT32 if weights == "native" else BFLOAT16
        given = {"rule": rule, "storage": storage, "weights": weights, "param": dtype, "grad": dtype, "config": None}
        elementary = rule in ("adamw", "lion")
        twin = Twin(Case(**given)) if elementary else MatrixTwin(MatrixCase(**given, shapes=SHAPES))
        twin.new_gradients()
        twin.engine.gradients.refresh()
        with recording([elementwise, foam, matrix, means, muon, orthogonal]) as found:
            engine.launch(twin.table, Call(matched=True, track=True))
            if rule in ("foam_l2", "adamw_shared_in"):
                engine.launch(twin.table, Call(mode="repair", matched=True))
                engine.launch(twin.table, Call(mode="measure", track=True, marked=True))
        assert {one.kernel for one in found} & set(STEPPING)
        for one in found:
            assert one.spilled_bytes <= MOST_SPILLED, one
            if one.kernel in STEPPING and "MODE=step" in one.switches:
                assert min(one.widest) >= (64 if dtype is FLOAT32 else 32), one

    def test_what_other_warps_have_to_load_is_stored_behind_a_barrier():
        from baoc.kernels.triton import copies, elementwise, matching
        from tests.support.kernel_compiling import recording

        twin = Twin(Case(rule="lion", config=None))
        twin.new_gradients()
        with recording([copies, elementwise, matching]) as found:
            prepare(twin.table, options=twin.case.options)
            twin.engine.run(matched=True)
        by_name = {one.kernel: one.ptx for one in found}
        assert {"copy_slot_kernel", "copy_kernel", "sum_kernel", "match_kernel"} <= by_name.keys()
        slot, match = by_name["copy_slot_kernel"], by_name["match_kernel"]
        assert slot.rindex("ld.global.cv") < slot.rindex("bar.sync") < slot.rindex("st.global")
        assert match.index("bar.sync") < match.index("st.global")

    @pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
    @pytest.mark.parametrize(("rule", "storage", "weights", "kept"), AGAIN)
    def test_a_launch_that_is_made_again_is_the_same(rule: str, storage: str, weights: str, kept: str):
        """The second is not Triton's own: it takes addresses, and the kernel that the first one found."""
        from baoc.kernels.triton import muon_plan
        from tests.support.kernel_compiling import noted_launches

        dtype = FLOAT32 if weights == "native" else BFLOAT16
        given = {"rule": rule, "storage": storage, "weights": weights, "param": dtype, "grad": dtype, "config": None}
        shapes = SHAPES if kept != "all" else SHAPES[:1]
        twin = Twin(Case(**given)) if rule in ("adamw", "lion") else MatrixTwin(MatrixCase(**given, shapes=shapes))
        twin.new_gradients()
        twin.engine.gradients.refresh()
        if rule == "muon":
            workspaces = [torch.empty(muon_plan.plan_of(twin.table).workspace_bytes, dtype=torch.uint8) for _ in "ab"]
            twin.table.workspace = workspaces[0]
        other = BFLOAT16 if dtype is FLOAT32 else FLOAT32
        calls = [Call(), Call(matched=True, track=True)]
        if rule == "adamw":  # what launches are kept by is the same for every rule, and compiling takes seconds
            calls += [Call(marked=True), Call(mode="repair", matched=True)]
        variants = [(call, dtype, True) for call in calls] + [(Call(), dtype, False), (Call(), other, True)]
        with noted_launches() as noted:
            rounds = []
            for _ in range(3):
                for call, twin.table.grad_dtype, twin.table.grads_aligned in variants:
                    engine.launch(twin.table, call)
                rounds.append(noted[:])
                noted.clear()
            if rule == "muon":
                twin.table.workspace = workspaces[1]
            else:
                engine.Engine([twin.table], graphs=False)  # other buffers
            engine.launch(twin.table, Call())
        first, second, third = ([one.bare() for one in launches] for launches in rounds)
        assert first == second == third
        num_kept = {"all": len(first), "stepping": len(variants), "none": 0}[kept]
        assert [sum(one.is_bare for one in launches) for launches in rounds] == [0, num_kept, num_kept]
        assert noted and not any(one.is_bare or one.bare() in first for one in noted[-1:])

    @pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
    def test_launches_of_an_engine_are_made_again_by_all_that_they_depend_on(monkeypatch: pytest.MonkeyPatch):
        from tests.support.kernel_compiling import Launched, noted_launches

        twin = Twin(Case(rule="lion", config=None))
        twin.new_gradients()
        upload = Upload(64, num_back=1, device=torch.device("cpu"))
        with noted_launches() as noted:
            prepare(twin.table, options=twin.case.options)

            def one_round() -> list[Launched]:
                noted.clear()
                twin.engine.run(matched=True, measure=[twin.table])
                twin.engine.run(matched=True)
                upload.copy_up(8)
                upload.copy_up()
                upload.receive()
                return noted[:]

            first, second = one_round(), one_round()
            monkeypatch.setattr(KeptLaunches, "run", lambda self, key, launch, of=None: launch())
            plain = one_round()
        assert all(one.is_bare for one in second) and not any(one.is_bare for one in plain)
        assert [[one.bare() for one in launches] for launches in (first, second)] == [[o.bare() for o in plain]] * 2
