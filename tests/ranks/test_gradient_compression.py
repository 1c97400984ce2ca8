"""What a compression hook has not sent yet, put back where gradients are."""

from __future__ import annotations

from harness.ranks import Team, on_ranks
from torch import Tensor, device, nn, ones
from torch.nn.parallel import DistributedDataParallel

from jobkit.train.gradient_compression import Compression


def restore_on_another_device(team: Team) -> None:
    model = DistributedDataParallel(nn.Linear(40, 40))
    compression = Compression(model, "powersgd", powersgd_start=2)
    for _ in range(4):
        model(ones(2, 40) + team.rank).square().mean().backward()
    saved = compression.state_dict()
    drawn = saved["rng"].get_state()[1].tolist()
    compression.device = device("meta")  # as though the model were on a GPU, and what was saved on the CPU
    compression.load_state_dict(saved)
    state = compression.power_sgd
    assert state is not None and state.process_group is model.process_group
    for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
        assert memory and all(isinstance(one, Tensor) and one.device.type == "meta" for one in memory.values())
    assert state.rng.get_state()[1].tolist() == drawn and state.iter == saved["iter"]


def test_powersgds_memory_is_restored_to_the_device_of_the_model() -> None:
    on_ranks(2, restore_on_another_device)
