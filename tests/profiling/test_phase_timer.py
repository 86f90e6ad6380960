"""Seconds by phase, and the phase that compiling is."""

import torch
from torch._dynamo.callback import callback_handler

from baoc.profiling.phase_timer import PhaseTimer


def test_compiling_may_be_reset_while_it_is_timed():
    before = [*callback_handler.start_callbacks, *callback_handler.end_callbacks]
    with PhaseTimer().compiling("compiling"):
        torch.compiler.reset()
    timer = PhaseTimer()
    with timer.compiling("compiling"):
        assert len(callback_handler.start_callbacks) == 1
    assert not [
        one for one in (*callback_handler.start_callbacks, *callback_handler.end_callbacks) if one not in before
    ]
