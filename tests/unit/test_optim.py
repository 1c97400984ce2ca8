"""fused_ema_adam: torch's AdamW, bit for bit, and an average of the weights that survives what happens to it."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from harness.small_model import SAME_TRAJECTORY, assert_same, averages, net, take_steps, values
from torch import Tensor, nn

from jobkit.log import log
from jobkit.train import optim
from jobkit.train.optim import fused_ema_adam
from jobkit.train.optimizer_state import load_optimizer_state, optimizer_state, parameter_names

EITHER_KERNEL = pytest.mark.parametrize("fused", [True, False])


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@EITHER_KERNEL
def test_the_parameters_are_those_of_torchs_adamw_to_the_last_bit(fused: bool) -> None:
    ours, theirs = net(), net()
    take_steps(ours, fused_ema_adam(ours.parameters(), 1e-2, (0.9, 0.95), 1e-7, 0.1, fused=fused), 0, 20)
    adamw = torch.optim.AdamW(theirs.parameters(), 1e-2, (0.9, 0.95), 1e-7, 0.1, fused=fused or None)
    take_steps(theirs, adamw, 0, 20)
    assert_same(values(ours), values(theirs))


def test_fifty_steps_without_the_fused_kernel_lead_to_the_same_weights_and_averages() -> None:
    fused, plain = net(), net()
    with_kernel = fused_ema_adam(fused.parameters(), 1e-2)
    without = fused_ema_adam(plain.parameters(), 1e-2, fused=False)
    assert with_kernel.param_groups[0]["fused"] and not without.param_groups[0]["fused"]
    take_steps(fused, with_kernel, 0, 50)
    take_steps(plain, without, 0, 50)
    torch.testing.assert_close(values(fused), values(plain), **SAME_TRAJECTORY)
    torch.testing.assert_close(averages(with_kernel), averages(without), **SAME_TRAJECTORY)


@EITHER_KERNEL
def test_the_average_moves_by_the_smaller_of_ema_decay_and_what_the_number_of_updates_allows(fused: bool) -> None:
    module = net()
    optimizer = fused_ema_adam(module.parameters(), 1e-2, ema_decay=0.5, fused=fused)
    expected = [parameter.double() for parameter in values(module)]
    for n in range(1, 21):  # (1 + n) / (10 + n) is 2/11 at the first update, and above 0.5 from the ninth on
        take_steps(module, optimizer, n, n + 1)
        decay = min(0.5, (1 + n) / (10 + n))
        expected = [decay * old + (1 - decay) * new for old, new in zip(expected, values(module), strict=True)]
        torch.testing.assert_close([one.double() for one in averages(optimizer)], expected, rtol=0.0, atol=1e-6)


def test_a_parameter_without_a_gradient_is_left_alone_and_so_is_its_average() -> None:
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = fused_ema_adam([used, unused], 1e-2)
    for _ in range(3):
        used.grad = torch.ones(3)
        optimizer.step()
    assert unused not in optimizer.state
    unused.grad = torch.ones(3)
    optimizer.step()  # its own first update, whatever the others have had
    assert optimizer.state[used]["step"] == 4
    assert optimizer.state[unused]["step"] == 1
    expected = 2 / 11 * torch.ones(3) + 9 / 11 * unused.detach()
    torch.testing.assert_close(optimizer.state[unused]["ema"], expected)
    with optimizer.averaged():
        torch.testing.assert_close(unused.detach(), expected)


@EITHER_KERNEL
def test_a_step_that_a_grad_scaler_skips_leaves_average_and_count_alone(fused: bool) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = fused_ema_adam([parameter], 1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(gradient: float) -> None:
        parameter.grad = None
        scaler.scale((parameter * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    step(float("inf"))
    assert torch.equal(parameter, torch.ones(3))
    assert not optimizer.state[parameter] or torch.equal(optimizer.state[parameter]["ema"], torch.ones(3))
    step(1.0)
    before = copy.deepcopy(optimizer.state[parameter])
    assert before["step"] == 1
    torch.testing.assert_close(before["ema"], 2 / 11 * torch.ones(3) + 9 / 11 * parameter.detach())
    step(float("nan"))
    assert optimizer.state[parameter]["step"] == 1
    assert torch.equal(optimizer.state[parameter]["ema"], before["ema"])


def test_gradients_may_come_from_a_closure() -> None:
    module, other = net(), net()
    x = torch.ones(4, 8)
    optimizer = fused_ema_adam(module.parameters(), 1e-2)

    def closure() -> Tensor:
        loss: Tensor = module(x).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure) is not None
    same = fused_ema_adam(other.parameters(), 1e-2)
    other(x).square().mean().backward()
    same.step()
    assert_same(averages(optimizer), averages(same))


def test_inside_averaged_the_model_is_its_average_and_afterwards_what_it_was() -> None:
    module = net()
    optimizer = fused_ema_adam(module.parameters(), 1e-2)
    initial = values(module)
    with optimizer.averaged():
        assert_same(values(module), initial)  # nothing was updated yet
    take_steps(module, optimizer, 0, 5)
    trained = values(module)
    with optimizer.averaged():
        assert_same(values(module), averages(optimizer))
        assert torch.is_grad_enabled()
    assert_same(values(module), trained)
    with pytest.raises(KeyError), optimizer.averaged():
        raise KeyError("validation failed")
    assert_same(values(module), trained)
    take_steps(module, optimizer, 5, 6)


def test_averaged_inside_averaged_and_a_step_inside_are_refused() -> None:
    module = net()
    optimizer = fused_ema_adam(module.parameters(), 1e-2)
    take_steps(module, optimizer, 0, 3)
    trained = values(module)
    with optimizer.averaged():
        with pytest.raises(RuntimeError, match="their averages already"), optimizer.averaged():
            pass
        assert_same(values(module), averages(optimizer))
        module(torch.ones(1, 8)).sum().backward()
        with pytest.raises(RuntimeError, match="inside averaged"):
            optimizer.step()
    assert_same(values(module), trained)


@EITHER_KERNEL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_goes_on_to_the_last_bit(fused: bool, dtype: torch.dtype) -> None:
    whole = net(dtype)
    optimizer = fused_ema_adam(whole.parameters(), 1e-2, fused=fused)
    take_steps(whole, optimizer, 0, 10)

    first = net(dtype)
    begun = fused_ema_adam(first.parameters(), 1e-2, fused=fused)
    take_steps(first, begun, 0, 4)
    saved = through_a_file({"model": first.state_dict(), "optimizer": begun.state_dict()})
    second = net(dtype)
    second.load_state_dict(saved["model"])
    continued = fused_ema_adam(second.parameters(), 1e-2, fused=fused)
    continued.load_state_dict(saved["optimizer"])
    take_steps(second, continued, 4, 10)

    assert_same(values(second), values(whole))
    assert_same(averages(continued), averages(optimizer))


def test_the_average_of_bfloat16_weights_is_float32_and_stays_so_when_loaded() -> None:
    module = net(torch.bfloat16)
    optimizer = fused_ema_adam(module.parameters(), 1e-3)
    take_steps(module, optimizer, 0, 10)
    assert all(average.dtype == torch.float32 for average in averages(optimizer))
    assert any(not torch.equal(average, average.bfloat16().float()) for average in averages(optimizer))
    trained = values(module)
    with optimizer.averaged():
        assert_same(values(module), [average.bfloat16() for average in averages(optimizer)])
    assert_same(values(module), trained)
    loaded = fused_ema_adam(net(torch.bfloat16).parameters())
    loaded.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_same(averages(loaded), averages(optimizer))


def test_a_run_goes_on_where_there_is_no_fused_kernel() -> None:
    module = net()
    fused = fused_ema_adam(module.parameters(), 1e-2, fused=True)
    take_steps(module, fused, 0, 5)
    saved = through_a_file({"model": module.state_dict(), "optimizer": fused.state_dict()})
    elsewhere = net()
    elsewhere.load_state_dict(saved["model"])
    plain = fused_ema_adam(elsewhere.parameters(), fused=False)
    plain.load_state_dict(saved["optimizer"])
    assert plain.param_groups[0]["fused"] is None
    assert plain.param_groups[0]["lr"] == 1e-2
    take_steps(module, fused, 5, 25)
    take_steps(elsewhere, plain, 5, 25)
    torch.testing.assert_close(values(elsewhere), values(module), **SAME_TRAJECTORY)
    torch.testing.assert_close(averages(plain), averages(fused), **SAME_TRAJECTORY)


def test_the_state_of_a_plain_adamw_is_taken_and_the_average_begins_there() -> None:
    module = net()
    adamw = torch.optim.AdamW(module.parameters(), 1e-2)
    take_steps(module, adamw, 0, 5)
    optimizer = fused_ema_adam(module.parameters(), 1e-2)
    optimizer.load_state_dict(through_a_file(adamw.state_dict()))
    with optimizer.averaged():
        before = values(module)
    take_steps(module, optimizer, 5, 6)
    decay = (1 + 6) / (10 + 6)
    expected = [decay * old + (1 - decay) * new for old, new in zip(before, values(module), strict=True)]
    torch.testing.assert_close(averages(optimizer), expected)


def test_a_copy_of_the_optimizer_keeps_its_own_average() -> None:
    module = net()
    optimizer = fused_ema_adam(module.parameters(), 1e-2)
    take_steps(module, optimizer, 0, 2)
    twin, its_optimizer = copy.deepcopy((module, optimizer))
    take_steps(module, optimizer, 2, 6)
    take_steps(twin, its_optimizer, 2, 6)
    assert_same(averages(its_optimizer), averages(optimizer))


@pytest.mark.parametrize("decay", [-0.1, 1.0, 2.0])
def test_a_decay_that_is_none_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=f"ema_decay: found {decay}"):
        fused_ema_adam(net().parameters(), ema_decay=decay)


def test_where_there_is_no_fused_kernel_one_line_says_so_and_the_average_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log.addHandler(caplog.handler)
    optim._warn_once.cache_clear()
    try:
        found = []
        for _ in range(3):
            parameter = nn.Parameter(torch.ones(3, dtype=torch.complex64))
            optimizer = fused_ema_adam([parameter], 1e-2)
            parameter.grad = torch.ones(3, dtype=torch.complex64)
            optimizer.step()
            with optimizer.averaged():
                found.append(parameter[0].item())
    finally:
        log.removeHandler(caplog.handler)
    said = "no fused AdamW for complex numbers: using the plain one; the moving average is kept"
    assert {record.getMessage() for record in caplog.records} == {said}
    first, *others = found
    assert others == [first, first]
    updated = 1 - 1e-2 * (1e-2 + 1.0)  # the decay of the weight, and Adam's first step, which is the learning rate
    assert first.real == pytest.approx(2 / 11 + 9 / 11 * updated, abs=1e-6)


def test_who_insists_on_the_fused_kernel_is_told_why_there_is_none() -> None:
    with pytest.raises(ValueError, match="no fused AdamW for complex numbers"):
        fused_ema_adam([nn.Parameter(torch.ones(3, dtype=torch.complex64))], fused=True)


def test_a_state_that_was_loaded_keeps_the_order_of_the_parameters() -> None:
    # The order of a set of names differs from process to process, and a state that differs cannot be saved as shared.
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    names = parameter_names([module])
    load_optimizer_state(optimizer, names, optimizer_state(optimizer, names))
    assert list(optimizer_state(optimizer, names)["state"]) == list(names.values())
