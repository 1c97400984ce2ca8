"""The norm of gradients, whatever their type."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from jobkit.train.gradients import LossScaler, clip_gradients, gradient_norm, scale_gradients


def parameter(gradient: Tensor) -> nn.Parameter:
    made = nn.Parameter(torch.zeros_like(gradient))
    made.grad = gradient.clone()
    return made


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_norm_is_exact_and_does_not_overflow(dtype: torch.dtype) -> None:
    gradient = (torch.randn(10001, generator=torch.Generator().manual_seed(0)) * 1000).to(dtype)
    small = torch.randn(7, generator=torch.Generator().manual_seed(1))
    norm = gradient_norm([parameter(gradient), parameter(small)])
    assert norm.dtype == torch.float32 and norm > torch.finfo(torch.float16).max
    exact = torch.cat([gradient.double(), small.double()]).norm()
    torch.testing.assert_close(norm.double(), exact, rtol=1e-5, atol=0)  # 10,000 numbers added up in float32


def test_parameters_without_gradients_are_left_as_they_are() -> None:
    frozen = [nn.Parameter(torch.ones(2))]
    clip_gradients(frozen, 1.0, gradient_norm(frozen))
    scale_gradients(frozen, 0.5)
    assert frozen[0].grad is None


def test_gradients_that_are_added_to_others_have_the_scale_of_those() -> None:
    scaler = LossScaler(scale=8.0)
    assert scaler.begin(lambda: False) == 8.0
    assert not scaler.accepts(torch.tensor(torch.inf))
    assert (scaler.scale, scaler.begin(lambda: True)) == (4.0, 8.0)
    resumed = LossScaler(scale=2.0)
    resumed.load_state_dict(scaler.state_dict())
    assert resumed.begin(lambda: True) == 8.0, "those of before the interruption are unscaled by another number"
    assert resumed.begin(lambda: False) == 4.0
