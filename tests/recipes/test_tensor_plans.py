"""The three experiments' models divided over ranks, by tensor and by pipeline: together they are the dense model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness.ranks import Team, on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from experiments.cogvideo.transformer import VideoTransformer
from experiments.imagenet64.unet import UNet
from experiments.minimind.model import MiniMind
from jobkit.errors import UsageError
from jobkit.run.config import CommConfig, ParallelConfig
from jobkit.run.layout import factor
from jobkit.train.parallel import Parallel, unwrapped

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
"""Sums in another order, in numbers of about 1."""


def unet() -> nn.Module:
    # Six heads in the middle, which two ranks divide and four do not; one at full resolution, which stays whole.
    return UNet(1, 10, width=8, multipliers=[1, 6], blocks=1, attention=[1, 2], head=8, dropout=0.0)


def video_transformer() -> nn.Module:
    return VideoTransformer(channels=4, text=6, dim=16, layers=2, heads=2, time=8)


def language_model() -> nn.Module:
    return MiniMind(257, dim=32, layers=2, heads=4, kv_heads=2, hidden=64, theta=1e4, tie=True)


def inputs_of(model: nn.Module) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    if isinstance(model, UNet):
        return torch.randn(2, 1, 8, 8, generator=generator), torch.tensor([0.3, 0.6]), torch.tensor([3, 10])
    if isinstance(model, VideoTransformer):
        latent, text = torch.randn(2, 4, 3, 4, 6, generator=generator), torch.randn(2, 5, 6, generator=generator)
        return latent, torch.tensor([0, 999]), text
    return (torch.randint(257, (2, 12), generator=generator),)


MODELS: list[Callable[[], nn.Module]] = [unet, video_transformer, language_model]
SPREAD = {"tensor": {"tensor": 2}, "zero3 x tensor": {"data": "zero3", "tensor": 2}}


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():  # what starts as zeros or ones would hide mistakes
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def output_and_gradients(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    output = model(*inputs_of(model))
    output.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    whole = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in gradients.items()}
    return output.detach(), whole


def spread_all(team: Team) -> tuple[list[Any], list[str]]:
    def spread(make: Callable[[], nn.Module], case: dict[str, Any]) -> nn.Module:
        config = ParallelConfig(**case)
        layout = factor(config, team.world_size, team.world_size)
        return Parallel(layout, config, CommConfig(), torch.device("cpu"), team.rank).spread(made(make))

    found, refused = [], []
    for case in SPREAD.values():
        for make in MODELS:
            model = spread(make, case)
            own = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
            found.append((*output_and_gradients(model), own))
    for make in MODELS:
        try:
            spread(make, {"tensor": "all"})
            refused.append("")
        except UsageError as error:
            refused.append(str(error))
    return found, refused


@pytest.fixture(scope="module")
def on_four_ranks() -> list[tuple[list[Any], list[str]]]:
    """Of each rank: what each model gives, spread each way, and what was said of four ranks for a tensor."""
    return on_ranks(4, spread_all)


@pytest.mark.parametrize("number", range(len(MODELS)), ids=[make.__name__ for make in MODELS])
def test_divided_over_ranks_it_is_the_dense_model(on_four_ranks: list[Any], number: int) -> None:
    dense = made(MODELS[number])
    output, gradients = output_and_gradients(dense)
    size = sum(parameter.numel() for parameter in dense.parameters())
    for found, _ in on_four_ranks:
        shares = []
        for case, (its_output, its_gradients, own) in zip(SPREAD, found[number :: len(MODELS)], strict=True):
            torch.testing.assert_close(its_output, output, **TOLERANCE)
            assert its_gradients.keys() == gradients.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(its_gradients[name], gradient, **TOLERANCE, msg=f"{case}: {name}")
            shares.append(own / size)
        assert shares[0] < 0.95 and shares[1] < 0.6 * shares[0]


def test_heads_that_do_not_divide_are_refused_in_a_line_or_stay_whole(on_four_ranks: list[Any]) -> None:
    for _, (of_unet, of_video, of_language) in on_four_ranks:
        assert of_unet == ""
        for said, model in ((of_video, "VideoTransformer"), (of_language, "MiniMind")):
            beginning = f"parallel.tensor: {model}.tensor_plan(): 2 heads of attention do not divide by 4 ranks"
            assert said == f"{beginning}; possible are 1, 2"


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def in_stages(team: Team) -> tuple[Tensor, dict[str, Tensor]]:
    config = ParallelConfig(pipeline="all")
    layout = factor(config, team.world_size, team.world_size)
    parallel = Parallel(layout, config, CommConfig(), torch.device("cpu"), team.rank)
    model = parallel.spread(made(video_transformer))
    inputs = inputs_of(video_transformer())
    target = torch.zeros_like(inputs[0])
    parallel.backward(model, inputs, mean_square, target, global_batch_size=2, autocast=nullcontext)
    with torch.no_grad():
        output = model(*inputs)
    return output, {name: parameter.grad for name, parameter in unwrapped(model).named_parameters()}


def test_the_video_transformer_in_stages_is_the_dense_model() -> None:
    output, gradients = output_and_gradients(made(video_transformer))
    found = on_ranks(2, in_stages)
    assert {**found[0][1], **found[1][1]}.keys() == gradients.keys()
    for its_output, its_gradients in found:
        assert 0 < len(its_gradients) < len(gradients)
        torch.testing.assert_close(its_output, output, **TOLERANCE)
        for name, gradient in its_gradients.items():
            torch.testing.assert_close(gradient, gradients[name], **TOLERANCE, msg=name)
