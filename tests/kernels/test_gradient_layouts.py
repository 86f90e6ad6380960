"""Where the fused step takes gradients to be, with more tensors than it looks at closely in each step."""

import pytest
import torch
from torch import Tensor, nn

from baoc.kernels import FusedTable, Kind
from baoc.kernels.triton import staging
from baoc.kernels.triton.staging import Gradients

NUM = 20


def make(*, dtype: torch.dtype = torch.float32) -> tuple[list[nn.Parameter], Gradients]:
    """Two tables: 19 tensors of one, and one of another."""
    params = [nn.Parameter(torch.zeros(6, 6, dtype=dtype)) for _ in range(NUM)]
    tables = [FusedTable(own, kind=Kind(rule="sign"), states=[{} for _ in own]) for own in (params[:-1], params[-1:])]
    return params, Gradients(tables, starts=[0, NUM, NUM + 4])


def give(params: list[nn.Parameter]) -> list[Tensor]:
    grads = [torch.ones_like(param) for param in params]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return grads


def addresses(gradients: Gradients) -> list[int]:
    return [gradients.addresses[place] for place in gradients.places]


def test_gradients_that_come_and_go_between_places_are_found_each_time() -> None:
    params, gradients = make()
    sets = [give(params) for _ in range(3)]
    seen = []
    for index in (0, 1, 0, 2, 2, 1, 0):
        for param, grad in zip(params, sets[index], strict=True):
            param.grad = grad
        gradients.refresh()
        assert addresses(gradients) == [grad.data_ptr() for grad in sets[index]]
        assert all(gradients.active) and not gradients.copied
        seen.append(gradients.version)
    assert len(set(seen)) == 6 and seen[3] == seen[4]  # only the one that stayed is no other
    assert gradients.num_changes == 1


def test_some_gradients_missing_and_back_again() -> None:
    params, gradients = make()
    grads = give(params)
    gradients.refresh()
    for without in ((0, 7), (NUM - 1,), (0, 7), ()):
        for index, param in enumerate(params):
            param.grad = None if index in without else grads[index]
        gradients.refresh()
        assert gradients.active == [index not in without for index in range(NUM)]
        assert addresses(gradients) == [0 if i in without else g.data_ptr() for i, g in enumerate(grads)]
    assert gradients.num_changes == 5


def test_strided_and_other_types_at_new_places_are_copied_and_plain_ones_after_them_are_not() -> None:
    params, gradients = make(dtype=torch.bfloat16)
    plain = give(params)
    gradients.refresh()
    variant = gradients.variant
    params[3].grad = torch.arange(36, dtype=torch.bfloat16).view(6, 6).t()
    params[4].grad = None
    params[4].grad_dtype = torch.float32  # pyright: ignore[reportAttributeAccessIssue]
    params[4].grad = torch.ones(6, 6)
    for _ in range(2):
        gradients.refresh()
        # The table has two types now, so its launch reads fp32 and all others are copies.
        assert gradients.copied == [index for index in range(NUM - 1) if index != 4]
        assert gradients.variant[0][0] is torch.float32 and gradients.variant[1][0] is torch.bfloat16
        assert addresses(gradients)[4] == params[4].grad.data_ptr()  # pyright: ignore[reportOptionalMemberAccess]
    params[4].grad = None
    params[4].grad_dtype = torch.bfloat16  # pyright: ignore[reportAttributeAccessIssue]
    for param, grad in zip(params, plain, strict=True):
        param.grad = grad
    gradients.refresh()
    assert not gradients.copied and gradients.variant == variant
    assert addresses(gradients) == [grad.data_ptr() for grad in plain]


def test_a_gradient_that_comes_with_a_type_of_its_own_to_places_that_were_known_is_copied() -> None:
    params, gradients = make(dtype=torch.bfloat16)
    for param in params[:-1]:
        param.grad_dtype = torch.float32  # pyright: ignore[reportAttributeAccessIssue]
        param.grad = torch.ones(6, 6)
    gradients.refresh()  # the first table reads fp32
    for param in params[1:-1]:
        param.grad = None
        param.grad_dtype = torch.bfloat16  # pyright: ignore[reportAttributeAccessIssue]
    params[0].grad = None
    sets = [[torch.ones(6, 6, dtype=torch.bfloat16) for _ in range(NUM - 2)] for _ in range(2)]
    for grads in (*sets, *sets):
        for param, grad in zip(params[1:-1], grads, strict=True):
            param.grad = grad
        gradients.refresh()
        assert gradients.variant[0][0] is torch.bfloat16 and not gradients.copied
    params[0].grad = torch.ones(6, 6)  # fp32 as it was, in a table that reads bf16 now
    gradients.refresh()
    read = [params[i].grad.dtype if i not in gradients.copied else gradients.variant[0][0] for i in range(NUM - 1)]  # pyright: ignore[reportOptionalMemberAccess]
    assert set(read) == {gradients.variant[0][0]}


def test_few_gradients_are_looked_at_closely_though_they_stay_where_they_are() -> None:
    param = nn.Parameter(torch.zeros(6, 6))
    gradients = Gradients([FusedTable([param], kind=Kind(rule="sign"), states=[{}])], starts=[0, 4])
    grad = torch.arange(36.0).view(6, 6)
    param.grad = grad
    gradients.refresh()
    assert not gradients.copied
    param.grad = grad.t()  # the same address
    gradients.refresh()
    assert gradients.copied == [0] and addresses(gradients) != [grad.data_ptr()]
    param.grad = grad
    gradients.refresh()
    assert not gradients.copied and addresses(gradients) == [grad.data_ptr()]


def test_looking_one_by_one_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no compiler, or a torch of another make."""
    asked = []
    monkeypatch.setattr(staging, "grad_addresses", asked.append)
    test_gradients_that_come_and_go_between_places_are_found_each_time()
    test_some_gradients_missing_and_back_again()
    test_strided_and_other_types_at_new_places_are_copied_and_plain_ones_after_them_are_not()
    assert len(asked) == 3 and len(asked[0]) == NUM


def test_a_sparse_gradient_is_refused_each_time_and_forgotten() -> None:
    params, gradients = make()
    grads = give(params)
    gradients.refresh()
    params[3].grad = grads[3].to_sparse()
    for _ in range(2):
        with pytest.raises((RuntimeError, NotImplementedError)):
            gradients.refresh()
    params[3].grad = grads[3]
    gradients.refresh()
    assert addresses(gradients) == [grad.data_ptr() for grad in grads]


def test_only_so_many_places_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "MOST_LAYOUTS", 2)
    params, gradients = make()
    kept = []
    for _ in range(5):
        kept.append(give(params))
        gradients.refresh()
        assert len(gradients.layouts) <= 2
