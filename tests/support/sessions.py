"""A Session of one linear layer on a CPU, without a Trainer or a loop."""

import torch
from torch import nn

from baoc.core.budgets import parse_budget
from baoc.profiling import describe
from baoc.training.session import Session, SessionSettings


def session(budget: str, *, dtype: torch.dtype = torch.float32) -> Session:
    net = nn.Linear(4, 4).to(dtype)
    return Session(
        describe(net),
        params=dict(net.named_parameters()),
        budget=parse_budget(budget),
        settings=SessionSettings(),
        betas=(0.9, 0.999),
        device=torch.device("cpu"),
        module=net,
    )
