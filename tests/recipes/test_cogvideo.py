"""The cogvideo experiment: recipes, model, method, data, samples, and that an interruption changes nothing."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.attempts import attempt
from harness.experiment_folder import Folder
from harness.project import logged_steps, status, weights
from harness.ranks import Team, on_ranks
from omegaconf import OmegaConf
from PIL import Image, ImageSequence
from safetensors.torch import load_file, save_file
from torch import Tensor

from experiments.cogvideo.check import check
from experiments.cogvideo.clips import Clips, split, write_index
from experiments.cogvideo.diffusion import STEPS, NoiseSchedule, denoise, fixed_noise, guided, spread_steps
from experiments.cogvideo.digits import moving, to_latent, to_pixels, write_moving_digits
from experiments.cogvideo.show import side_by_side, strips, to_frames, write_shown
from experiments.cogvideo.train import drawn_clips, network, sample_clips
from experiments.cogvideo.transformer import VideoTransformer, patchify, positions, unpatchify
from jobkit.errors import InvalidValue
from jobkit.run.config import CommConfig, Config, ParallelConfig
from jobkit.run.experiment import load
from jobkit.run.layout import factor
from jobkit.train.order import share_of
from jobkit.train.parallel import Parallel

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "experiments" / "cogvideo.yaml"
SAMPLING = ROOT / "experiments" / "cogvideo_sample.yaml"


def recipe(monkeypatch: pytest.MonkeyPatch, folder: str | None) -> Config:
    monkeypatch.delenv("COGVIDEO_DATA", raising=False)
    if folder is not None:
        monkeypatch.setenv("COGVIDEO_DATA", folder)
    return load(RECIPE).config


def parameters(config: Config) -> int:
    with torch.device("meta"):
        net = network(OmegaConf.create(config.params))
    return sum(parameter.numel() for parameter in net.parameters())


def small_net(recompute: bool = False) -> VideoTransformer:
    torch.manual_seed(0)
    net = VideoTransformer(channels=4, text=6, dim=16, layers=2, heads=4, time=8, recompute=recompute)
    with torch.no_grad():
        for parameter in net.parameters():  # what starts at zero would hide mistakes
            parameter.add_(0.1 * torch.randn_like(parameter))
    return net


def some_input(n: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    latent = torch.randn(n, 4, 3, 4, 6, generator=generator)
    return latent, torch.tensor([0, STEPS - 1])[:n], torch.randn(n, 5, 6, generator=generator)


# The recipes


def test_the_full_recipe_is_the_published_transformer_of_1694_million_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = recipe(monkeypatch, "/data")
    assert config.inputs == ["/data", "", ""]  # neither published weights nor a decoder
    assert config.resources.world_size == 32
    assert (config.precision, config.parallel.data) == ("bf16", "hsdp")
    assert parameters(config) == 1_693_783_872


def test_without_latents_the_small_recipe_is_used_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe(monkeypatch, None)
    assert config.params["digits"]
    assert config.inputs == []
    assert parameters(config) == 403_792
    assert "COGVIDEO_DATA is not set" in load(RECIPE).notes[0]


# The model


def test_velocity_has_the_shape_of_the_latent_and_starts_at_zero() -> None:
    net = VideoTransformer(channels=4, text=6, dim=16, layers=2, heads=2, time=8)
    latent, t, text = some_input()
    velocity = net(latent, t, text)
    assert velocity.shape == latent.shape
    assert not velocity.any()


def test_velocity_depends_on_step_and_text_and_every_parameter_is_trained() -> None:
    net = small_net()
    latent, t, text = some_input()
    velocity = net(latent, t, text)
    assert not torch.allclose(velocity, net(latent, t + 50, text))
    assert not torch.allclose(velocity, net(latent, t, text + 1))
    velocity.square().sum().backward()
    assert [name for name, parameter in net.named_parameters() if parameter.grad is None] == []
    assert [name for name, parameter in net.named_parameters() if not parameter.grad.any()] == []


def test_text_and_video_are_shifted_scaled_and_gated_each_by_its_own_numbers() -> None:
    norm = small_net().block_0.norm1
    words, video, time = torch.randn(1, 2, 16), torch.randn(1, 3, 16), torch.randn(1, 8)
    tokens, words_gate, video_gate = norm(words, video, time)
    with torch.no_grad():
        norm.modulation.bias[: 3 * 16] += 1  # the first half is the video's
    changed, words_gate_after, video_gate_after = norm(words, video, time)
    assert torch.equal(tokens[:, :2], changed[:, :2]) and torch.equal(words_gate, words_gate_after)
    assert not torch.isclose(tokens[:, 2:], changed[:, 2:]).any()
    assert torch.allclose(video_gate + 1, video_gate_after)


def test_every_position_in_space_and_time_has_an_embedding_of_its_own() -> None:
    found = positions(13, 30, 45, 192, torch.device("cpu"))
    assert found.shape == (13 * 30 * 45, 192)
    assert len(found[::7].round(decimals=4).unique(dim=0)) == len(found[::7])
    latent = torch.arange(2 * 3 * 2 * 4 * 6.0).reshape(2, 3, 2, 4, 6)
    tokens, grid = patchify(latent, 2)
    assert grid == (2, 2, 3) and tokens.shape == (2, 12, 12)
    assert torch.equal(tokens[0, 4].reshape(3, 2, 2), latent[0, :, 0, 2:4, 2:4])  # frame 0, row 1, column 1
    assert torch.equal(unpatchify(tokens, grid, 2), latent)


def test_recomputed_activations_give_the_same_gradients() -> None:
    gradients = []
    for recompute in (False, True):
        net = small_net(recompute)
        net(*some_input()).square().mean().backward()
        gradients.append([parameter.grad for parameter in net.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def _gradients_when(team: Team, parallel: ParallelConfig) -> tuple[Tensor, dict[str, Tensor]]:
    layout = factor(parallel, team.world_size, team.world_size)
    net = Parallel(layout, parallel, CommConfig(), torch.device("cpu"), team.rank).spread(small_net())
    velocity = net(*some_input())
    velocity.square().mean().backward()
    whole = {
        name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for name, p in net.named_parameters()
    }
    return velocity.detach(), whole


def test_sharded_over_two_ranks_it_is_the_same_model() -> None:
    net = small_net()
    expected = net(*some_input())
    expected.square().mean().backward()
    for velocity, gradients in on_ranks(2, _gradients_when, ParallelConfig(data="zero3")):
        assert torch.allclose(velocity, expected, atol=1e-5)
        for name, parameter in net.named_parameters():
            assert torch.allclose(gradients[name], parameter.grad, atol=1e-5), name


@pytest.mark.filterwarnings("ignore:.*CPU autocast")
def test_it_computes_in_bfloat16_too() -> None:
    net = small_net()
    expected = net(*some_input())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        velocity = net(*some_input())
    assert torch.allclose(velocity.float(), expected, atol=0.1 * expected.abs().max().item())


# Diffusion


@pytest.mark.parametrize("snr_shift", [1.0, 3.0])
def test_the_last_step_is_pure_noise_and_the_first_nearly_data(snr_shift: float) -> None:
    schedule = NoiseSchedule(snr_shift)
    assert schedule.alpha[-1] == 0 and schedule.sigma[-1] == 1
    assert 0.99 < schedule.alpha[0] ** 2 < 1
    assert torch.allclose(schedule.alpha**2 + schedule.sigma**2, torch.ones(STEPS))
    assert (schedule.alpha.diff() < 0).all()


def test_the_shift_divides_the_signal_to_noise_ratio_before_the_end_is_bent_to_zero() -> None:
    def at_the_start(shift: float) -> float:  # where the bending changes nothing
        schedule = NoiseSchedule(shift)
        return float((schedule.alpha[0] / schedule.sigma[0]) ** 2)

    assert at_the_start(1.0) / at_the_start(3.0) == pytest.approx(3.0, rel=1e-3)


def test_data_and_noise_follow_from_a_noisy_sample_and_its_velocity() -> None:
    schedule = NoiseSchedule(3.0)
    x0, noise, t = torch.randn(3, 2, 2), torch.randn(3, 2, 2), torch.tensor([0, 400, STEPS - 1])
    x_t, velocity = schedule.noisy(x0, noise, t)
    alpha, sigma = schedule.alpha[t][:, None, None], schedule.sigma[t][:, None, None]
    assert torch.allclose(alpha * x_t - sigma * velocity, x0, atol=1e-5)
    assert torch.allclose(sigma * x_t + alpha * velocity, noise, atol=1e-5)
    assert torch.equal(x_t[2], noise[2]) and torch.equal(velocity[2], -x0[2])


@pytest.mark.parametrize(("batch", "ranks"), [(20, 4), (8, 3), (32, 5), (64, 12), (3, 3)])
def test_training_steps_are_spread_evenly_over_the_ranks_together(batch: int, ranks: int) -> None:
    torch.manual_seed(0)
    of_ranks = [spread_steps(batch, rank, ranks, torch.device("cpu")) for rank in range(ranks)]
    shares = [share_of(batch, rank, ranks) for rank in range(ranks)]
    assert [len(t) for t in of_ranks] == [share.stop - share.start for share in shares]
    together = torch.cat(of_ranks).sort().values
    part, size = torch.arange(batch, dtype=torch.float64), STEPS / batch
    assert ((part * size).floor() <= together).all() and (together < (part + 1) * size).all()
    assert all(t.max() - t.min() > STEPS / 2 for t in of_ranks if len(t) > 2)
    assert not torch.equal(of_ranks[0], spread_steps(batch, 0, ranks, torch.device("cpu")))


@pytest.mark.parametrize("ranks", [1, 4])
def test_where_the_ranks_divide_a_batch_the_training_steps_are_those_of_before(ranks: int) -> None:
    for rank in range(ranks):
        torch.manual_seed(rank)
        drawn = spread_steps(20, rank, ranks, torch.device("cpu"))
        torch.manual_seed(rank)
        n = 20 // ranks
        assert torch.equal(drawn, ((torch.arange(n) * ranks + rank + torch.rand(n)) * (STEPS / (n * ranks))).long())


def test_a_draw_next_to_one_is_no_step_beyond_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *shape, **options: torch.full(shape, 1 - 2**-24))
    assert spread_steps(64, 31, 32, torch.device("cpu"))[-1] == 999  # in float32, 63 + (1 - 2**-24) is 64


def test_validation_noise_depends_on_the_sample_alone() -> None:
    state = torch.get_rng_state()
    noise, t = fixed_noise(torch.arange(1000), torch.zeros(1000, 2))
    again, t_again = fixed_noise(torch.tensor([7, 5]), torch.zeros(2, 2))
    assert torch.equal(again, noise[[7, 5]]) and torch.equal(t_again, t[[7, 5]])
    assert torch.equal(state, torch.get_rng_state())
    counts = torch.bincount(t // 100, minlength=10)  # evenly spread over the range
    assert counts.min() >= 99 and counts.max() <= 101


def test_one_step_of_ddim_finds_data_that_is_always_the_same() -> None:
    schedule, x0 = NoiseSchedule(3.0), torch.randn(2, 3)

    def velocity(x: Tensor, t: Tensor) -> Tensor:  # of the one clip that there is
        alpha, sigma = schedule.alpha[t][:, None], schedule.sigma[t][:, None]
        return alpha * (x - alpha * x0) / sigma - sigma * x0

    for steps in (1, 7):
        found = denoise(velocity, torch.randn(2, 3), schedule, steps)
        assert torch.allclose(found, x0, atol=1e-5)


def test_more_steps_come_closer_to_the_flow_at_first_order() -> None:
    # Data that is normal with deviation 1/2: the flow scales noise to it, and the velocity is known.
    schedule, deviation = NoiseSchedule(1.0), 0.5

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        alpha, sigma = schedule.alpha[t].double(), schedule.sigma[t].double()
        factor = alpha * sigma * (1 - deviation**2) / (alpha**2 * deviation**2 + sigma**2)
        return factor[:, None] * x

    noise = torch.ones(1, 1, dtype=torch.float64)
    coarse, fine = (abs(denoise(velocity, noise, schedule, steps).item() - deviation) for steps in (250, 1000))
    # Steps that are equal in t are most uneven in the angle near pure noise, so it is 1 only in the limit.
    assert math.log(coarse / fine, 4) == pytest.approx(1, abs=0.1)


def test_guidance_extrapolates_from_no_text_past_the_text() -> None:
    net = small_net()
    latent, t, text = some_input()
    with torch.no_grad():
        with_text, without = net(latent, t, text), net(latent, t, torch.zeros_like(text))
        assert torch.allclose(guided(net, text, 0.0)(latent, t), with_text, atol=1e-5)
        assert torch.allclose(guided(net, text, 2.0)(latent, t), 3 * with_text - 2 * without, atol=1e-5)


def test_a_sampled_clip_depends_on_its_number_and_text_alone() -> None:
    p = OmegaConf.create({"latent": [4, 3, 4, 6], "guidance": 1.0, "denoising_steps": 3})
    net, schedule, (_, _, texts) = small_net(), NoiseSchedule(3.0), some_input()
    state = torch.get_rng_state()
    both = sample_clips(net, schedule, texts, [5, 6], p)
    assert both.shape == (2, 4, 3, 4, 6)
    assert torch.allclose(sample_clips(net, schedule, texts[1:], [6], p)[0], both[1], atol=1e-5)
    assert not torch.allclose(sample_clips(net, schedule, texts[1:], [5], p)[0], both[1], atol=0.1)
    assert torch.equal(state, torch.get_rng_state())


def validation_clips(ctx: Any) -> tuple[Any, int]:
    """What rank 0 is shown of four clips, and how often this rank has called the network, twice for each of them."""
    p = OmegaConf.create({"latent": [4, 3, 4, 6], "guidance": 1.0, "denoising_steps": 2})
    net = small_net()
    calls = []
    net.register_forward_hook(lambda *_: calls.append(1))
    held_out = [(torch.zeros(0), text) for text in torch.cat(2 * [some_input()[2]])]
    draw = drawn_clips(ctx, NoiseSchedule(3.0), net, p, lambda latent: latent)
    latents = ctx.map(draw, held_out, to="main")
    return (None if latents is None else [latent.tolist() for latent in latents]), len(calls)


def test_a_validation_draws_each_clip_once_on_one_rank_or_another(tmp_path: Path) -> None:
    ((serial, calls),) = attempt(1, tmp_path / "1", validation_clips)
    (first, *others) = attempt(3, tmp_path / "3", validation_clips)
    assert first[0] == serial and [latents for latents, _ in others] == [None, None]
    assert calls == first[1] + sum(calls for _, calls in others) == 8


# The data


LATENT, TEXT = (2, 3, 4, 4), (5, 6)
PARAMS = {"digits": False, "latent": list(LATENT), "text": list(TEXT), "held_out": 1, "vae": ""}
PARAMS |= {"model": {"dim": 16, "layers": 2, "heads": 4, "time": 8, "patch": 2, "rescale": 1.0}}
"""What a check looks at, beside the folder of the clips."""


def arrays(number: int) -> dict[str, Tensor]:
    return {"latent": torch.full(LATENT, float(number)), "text": torch.full(TEXT, -float(number))}


def write_npz(path: Path, **values: Tensor) -> None:
    np.savez(path, **{name: value.numpy() for name, value in values.items()})


def clips(folder: Path) -> Clips:
    index = folder.parent / "clips.npy"
    index.unlink(missing_ok=True)
    write_index(folder, index)
    return Clips(folder, index, LATENT, TEXT)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four clips, of the numbers 0 to 3: safetensors, one of them in half precision, and npz, one in a subfolder."""
    folder = tmp_path / "latents"
    (folder / "c").mkdir(parents=True)
    save_file(arrays(0), folder / "a.safetensors")
    save_file({name: value.bfloat16() for name, value in arrays(1).items()}, folder / "b.safetensors")
    write_npz(folder / "c" / "first.npz", **arrays(2))
    write_npz(folder / "d.npz", **{name: value.half() for name, value in arrays(3).items()})
    (folder / "notes.txt").write_text("not a clip")
    (folder / ".half.npz").write_text("being written")
    return folder


def test_clips_are_read_from_safetensors_and_npz_of_any_precision(folder: Path) -> None:
    found = clips(folder)
    assert len(found) == 4
    for number in range(4):
        latent, text = found[number]
        assert latent.dtype == text.dtype == torch.float32
        assert torch.equal(latent, torch.full(LATENT, float(number)))
        assert torch.equal(text, torch.full(TEXT, -float(number)))


def test_a_manifest_says_which_files_belong_together(folder: Path) -> None:
    lines = [{"latent": "d.npz", "text": "a.safetensors"}, {"latent": "c/first.npz", "text": "c/first.npz"}]
    (folder / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = clips(folder)
    assert [(latent[0, 0, 0, 0].item(), text[0, 0].item()) for latent, text in found] == [(3, 0), (2, -2)]
    with (folder / "manifest.jsonl").open("a") as manifest:
        manifest.write('{"latent": "a.safetensors"}\n')
    with pytest.raises(ValueError, match=r'manifest\.jsonl:3: found {"latent": "a.safetensors"}, expected'):
        clips(folder)


OPENING = """
import sys
from pathlib import Path

sys.path.append("tools")
from videos import find_videos

from experiments.cogvideo.clips import Clips, write_index

folder = Path(sys.argv[1])
write_index(folder, folder / "clips.npy")
assert len(Clips(folder, folder / "clips.npy", (1,), (1,))[0]) == 2
(video,) = find_videos(folder)
assert video.path.exists()
print(sys.getfilesystemencoding(), ascii(video.caption))
"""


def test_names_in_lists_are_utf_8_whatever_the_locale_of_a_machine(tmp_path: Path) -> None:
    save_file({"latent": torch.ones(1), "text": torch.ones(1)}, tmp_path / "é中.safetensors")
    both = {"latent": "é中.safetensors", "text": "é中.safetensors"}
    (tmp_path / "manifest.jsonl").write_text(json.dumps(both, ensure_ascii=False), encoding="utf-8")
    (tmp_path / "é中.mp4").touch()
    (tmp_path / "videos.txt").write_text("é中.mp4", encoding="utf-8")
    (tmp_path / "prompts.txt").write_text("un café", encoding="utf-8")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", OPENING, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | locale, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ascii", "'un", "caf\\xe9'"]


def test_clips_in_a_folder_that_is_a_link_are_found_once(folder: Path, tmp_path: Path) -> None:
    write_index(folder, tmp_path / "before.npy")
    (tmp_path / "disk" / "below").mkdir(parents=True)
    shutil.copy(folder / "a.safetensors", tmp_path / "disk" / "below" / "far.safetensors")
    (folder / "linked").symlink_to(tmp_path / "disk")
    (folder / "linked again").symlink_to(tmp_path / "disk")
    (folder / "around").symlink_to(folder)
    (folder / "nowhere").symlink_to(tmp_path / "nowhere")
    write_index(folder, tmp_path / "after.npy")
    before, after = (set(np.load(tmp_path / f"{name}.npy")[:, 0]) for name in ("before", "after"))
    assert len(np.load(tmp_path / "after.npy")) == len(before) + 1
    assert after - before == {b"linked/below/far.safetensors"} and before < after


def test_a_run_keeps_its_clips_when_others_are_added(folder: Path) -> None:
    found = clips(folder)
    save_file(arrays(4), folder / "0.safetensors")
    write_index(folder, found.index)
    assert len(Clips(folder, found.index, LATENT, TEXT)) == 4
    assert len(clips(folder)) == 5


def test_clips_travel_to_a_loader_worker_as_a_path(folder: Path) -> None:
    found = clips(folder)
    pickled = pickle.dumps(found)
    assert len(pickled) < 1000
    assert torch.equal(pickle.loads(pickled)[2][0], found[2][0])


@pytest.mark.parametrize("name", ["a.safetensors", "d.npz"])
def test_a_broken_file_is_named_in_one_line(folder: Path, name: str) -> None:
    found = clips(folder)
    number = {"a.safetensors": 0, "d.npz": 3}[name]
    whole = (folder / name).read_bytes()
    for content in (whole[:-20], b"garbage", b""):
        (folder / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}: no 'latent' can be read from it \([^\n]*\)$"):
            found[number]
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"{name}: no 'latent' can be read"):
        found[number]


def test_a_missing_array_and_a_wrong_shape_are_named(folder: Path) -> None:
    found = clips(folder)
    write_npz(folder / "d.npz", latent=torch.zeros(LATENT))
    with pytest.raises(ValueError, match=r"d\.npz: no 'text' can be read from it \(KeyError"):
        found[3]
    save_file({**arrays(0), "text": torch.zeros(4, 6)}, folder / "a.safetensors")
    with pytest.raises(ValueError, match=r"a\.safetensors: text is 4 x 6, expected 5 x 6"):
        found[0]


def test_an_empty_folder_and_too_many_held_out_clips_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"held_out: found 4, expected 1 to 3"):
        split(clips(folder), 4)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty: no clips in it"):
        clips(tmp_path / "empty")


def test_too_few_clips_are_refused_before_anything_is_queued(folder: Path, tmp_path: Path) -> None:
    params = PARAMS | {"data": str(folder), "held_out": 256}
    with pytest.raises(InvalidValue, match=rf"params.held_out: found 256, expected 1 to 3: {folder} has 4 clips"):
        check(params)
    check(params | {"held_out": 3})
    with pytest.raises(InvalidValue, match=r"params.held_out: found 0, expected 1 or more"):
        check(params | {"held_out": 0})
    write_manifest = "".join('{"latent": "a.safetensors", "text": "b.npz"}\n' for _ in range(2))
    (folder / "manifest.jsonl").write_text(write_manifest)
    with pytest.raises(InvalidValue, match="expected 1 to 1"):
        check(params)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidValue, match=r"params.data: .*empty: 0 clip\(s\) in it"):
        check(params | {"data": str(tmp_path / "empty")})
    with pytest.raises(InvalidValue, match=r"params.data: nowhere: no such folder"):
        check(params | {"data": "nowhere"})


def test_a_manifest_is_looked_at_before_anything_is_queued(folder: Path) -> None:
    params = PARAMS | {"data": str(folder)}
    lines = ['{"latent": "a.safetensors", "text": "a.safetensors"}', "", '{"latent": "d.npz", "text": "d.npz"}', "  "]
    (folder / "manifest.jsonl").write_text("\n".join(lines))
    check(params)
    assert len(clips(folder)) == 2
    for line, says in [
        ("b.npz", r'manifest.jsonl:5: found b.npz, expected {"latent": file, "text": file}'),
        ('{"latent": "d.npz", "text": "nowhere.npz"}', r"nowhere.npz: no such file, which manifest.jsonl names"),
    ]:
        (folder / "manifest.jsonl").write_text("\n".join([*lines, line]))
        with pytest.raises(InvalidValue, match=rf"params.data: .*{re.escape(says)}"):
            check(params)


def test_weights_of_which_a_file_is_missing_are_refused_before_anything_is_queued(folder: Path, tmp_path: Path) -> None:
    name, params = "diffusion_pytorch_model", PARAMS | {"data": str(folder)}
    (tmp_path / "config.json").touch()
    index = tmp_path / f"{name}.safetensors.index.json"

    def refused(key: str, says: str) -> None:
        with pytest.raises(InvalidValue, match=rf"params.{key}: .*{re.escape(says)}"):
            check(params | {key: str(tmp_path)})

    for key in ("start", "vae"):
        refused(key, f"no {name}.safetensors in it")
    for text in ("{", "[]", '{"weight_map": null}', '{"weight_map": {"a": 1}}'):
        index.write_text(text)
        refused("start", f"{index.name}: ")
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    (tmp_path / "1.safetensors").touch()
    refused("start", "no 2.safetensors in it")
    (tmp_path / "2.safetensors").touch()
    refused("start", "config.json cannot be read: ")


def test_clips_of_other_shapes_are_refused_before_anything_is_queued(folder: Path) -> None:
    params = PARAMS | {"data": str(folder)}
    for changes, says in [
        ({"latent": [3, 2, 4, 2]}, "params.latent: found [3, 2, 4, 2], and "),
        ({"text": [5, 7]}, " has [5, 6]; did you mean 'params.text=[5,6]'?"),
        ({"digits": True}, "params.latent: found [2, 3, 4, 4], and the moving digits have [4, 5, 8, 8]"),
    ]:
        with pytest.raises(InvalidValue, match=re.escape(says)):
            check(params | changes)
    check(params)
    whole = (folder / "a.safetensors").read_bytes()
    (folder / "a.safetensors").write_bytes(whole[:-1])
    with pytest.raises(InvalidValue, match=rf"params.data: .*a.safetensors: torn: {len(whole) - 1} bytes of"):
        check(params)
    save_file({"latents": torch.zeros(LATENT), "text": torch.zeros(TEXT)}, folder / "a.safetensors")
    with pytest.raises(InvalidValue, match=r"params.data: .*: no 'latent' in it; did you mean 'latents'\?"):
        check(params)


def test_clips_behind_a_link_count_before_anything_is_queued_as_they_do_in_training(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "disk").symlink_to(folder)
    check(PARAMS | {"data": str(tmp_path / "there"), "held_out": 3})
    assert len(clips(tmp_path / "there")) == 4


def test_the_small_model_trains_on_ones_own_clips(tmp_path: Path) -> None:
    place = folder_in(tmp_path / "folder")
    (place.path / "latents").mkdir()
    for number in range(8):
        clip = {"latent": torch.randn(16, 3, 8, 12), "text": torch.randn(226, 4096)}
        save_file(clip, place.path / "latents" / f"{number}.safetensors")

    def typed(recipe: str, *overrides: str) -> Path:
        place.python("-m", "jobkit", "submit", f"experiments/{recipe}.yaml", "--local", "--demo", *overrides)
        (run,) = place.path.glob(f"runs/{recipe}-*")
        return run

    sizes = ("params.latent=[16,3,8,12]", "params.text=[226,4096]", "resources.tasks_per_node=1", "params.batch=2")
    own = ("params.data=latents", "params.digits=false", "params.held_out=4", "params.steps=1")
    run = typed("cogvideo", *own, *sizes, "params.micro_batch=1", "params.denoising_steps=2")
    assert status(run)["step"] == 1 and list((run / "samples").glob("*.gif"))
    made = typed("cogvideo_sample", f"params.run={run}", "params.clips=4", "params.denoising_steps=2")
    assert len(list((made / "samples").glob("*.safetensors"))) == 4


def test_held_out_clips_are_not_trained_on(folder: Path) -> None:
    training, held_out = split(clips(folder), 1)
    numbers = [latent[0, 0, 0, 0].item() for part in (training, held_out) for latent, _ in part]
    assert sorted(numbers) == [0, 1, 2, 3] and len(held_out) == 1


def test_digits_move_as_their_text_says_and_are_written_once(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "digits"
    write_moving_digits(folder)
    write_moving_digits(folder)
    files = sorted(folder.iterdir())
    assert len(files) == 1797 and {file.name for file in folder.parent.iterdir()} == {".lock", "digits"}
    latents = [load_file(file) for file in files[::9]]
    assert all(one["latent"].shape == (4, 5, 8, 8) and one["text"].shape == (2, 16) for one in latents)
    values = torch.stack([one["latent"] for one in latents])
    assert abs(values.mean()) < 0.05 and values.std() == pytest.approx(1, abs=0.05)
    for file in files[::179]:
        pixels = to_pixels(load_file(file)["latent"].numpy())
        rows, columns = (((pixels * axis).sum((1, 2)) / pixels.sum((1, 2))) for axis in np.mgrid[0:16, 0:16])
        moved = {"right": (0, 8), "left": (0, -8), "down": (8, 0), "up": (-8, 0)}[file.name.split("_")[1]]
        assert (rows[-1] - rows[0], columns[-1] - columns[0]) == pytest.approx(moved, abs=1e-3)


# What is looked at


def test_pixels_survive_the_way_to_a_latent_and_back() -> None:
    clip = moving(np.random.default_rng(0).random((8, 8)), (0, 2), np.random.default_rng(1))
    latent = to_latent(clip)
    assert latent.shape == (4, 5, 8, 8)
    assert np.allclose(to_pixels(latent), clip, atol=1e-6)
    frames = to_frames(torch.from_numpy(latent), digits=True)
    assert frames.shape == (5, 1, 64, 64) and frames.dtype == torch.uint8
    assert np.array_equal(frames[:, 0, ::4, ::4], (clip * 255).round())


def test_latents_without_a_decoder_are_shown_as_colours() -> None:
    frames = to_frames(torch.zeros(16, 3, 6, 9), digits=False)
    assert frames.shape == (3, 3, 6, 9)
    assert (frames == 128).all()


def test_strips_and_animations_hold_every_frame(tmp_path: Path) -> None:
    videos = [torch.full((5, 1, 4, 6), 40 * clip, dtype=torch.uint8) for clip in range(2)]
    for video in videos:
        video += torch.arange(5, dtype=torch.uint8)[:, None, None, None]
    assert strips(videos).shape == (1, 2 * 6, 5 * 8)
    assert side_by_side(videos).shape == (5, 1, 6, 2 * 8)
    write_shown(tmp_path / "samples" / "both", videos)
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == ["both.gif", "both.png"]
    assert np.array_equal(animation(tmp_path / "samples" / "both.gif"), side_by_side(videos)[:, 0])
    with Image.open(tmp_path / "samples" / "both.png") as strip:
        assert np.array_equal(strip, strips(videos)[0])


def animation(path: Path) -> list[np.ndarray]:
    with Image.open(path) as opened:
        return [np.asarray(frame.convert("L")) for frame in ImageSequence.Iterator(opened)]


# Training and sampling


TRAINING = (
    "params={steps: 10, batch: 6, micro_batch: 4, warmup: 2, held_out: 20, validate_every: 4, validate_batch: 8,"
    " samples: 2, denoising_steps: 3, model: {dim: 16, layers: 2, heads: 2, time: 8}}"
)
MAKING = "params={clips: 5, batch: 2, denoising_steps: 3}"


def folder_in(path: Path) -> Folder:
    return Folder(path, "cogvideo", "write_shown")


def data_of(folder: Folder) -> str:
    """The parameter of its clips, which other folders can be given too."""
    return f"params.data={folder.path.parent / 'digits'}"


def samples(run: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (run / "samples").iterdir()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A folder with a finished training that nothing interrupted."""
    path = tmp_path_factory.mktemp("trained")
    folder = folder_in(path / "folder")
    folder.submit(RECIPE, TRAINING, data_of(folder), "resources.tasks_per_node=1")
    return folder


def test_an_interrupted_training_ends_with_the_same_weights_and_clips(trained: Folder, tmp_path: Path) -> None:
    folder, uninterrupted = folder_in(tmp_path / "folder"), trained.run("cogvideo")
    run = folder.script("train", RECIPE, TRAINING, data_of(trained), stop_after=2)
    assert status(run)["step"] in (4, 5)
    folder.script("train", RECIPE, TRAINING, data_of(trained))
    assert len(status(run)["attempts"]) == 2
    assert logged_steps(run) == list(range(10))
    assert weights(run) == weights(uninterrupted)
    assert status(run)["result"] == status(uninterrupted)["result"]
    assert samples(run) == samples(uninterrupted)


def test_a_validation_leaves_an_animation_and_a_strip_of_its_clips(trained: Folder) -> None:
    run = trained.run("cogvideo")
    assert sorted(samples(run)) == sorted(
        f"step_{step:08d}.{suffix}" for step in (0, 4, 8, 10) for suffix in ("gif", "png")
    )
    frames = animation(run / "samples" / "step_00000010.gif")
    assert len(frames) == 5 and {frame.shape for frame in frames} == {(66, 2 * 66)}
    assert all(frame.std() > 1 for frame in frames)
    with Image.open(run / "samples" / "step_00000010.png") as opened:
        strip = np.asarray(opened)
    assert strip.shape == (2 * 66, 5 * 66)
    assert np.array_equal(strip[:66, -66:], frames[-1][:, :66])
    for tag in ("strips", "clips", "validation/loss"):
        assert logged_steps(run, tag) == [0, 4, 8, 10]


def test_clips_are_the_same_on_one_rank_or_two_and_those_there_are_not_made_again(
    trained: Folder, tmp_path: Path
) -> None:
    run = trained.run("cogvideo")
    trained.submit(SAMPLING, MAKING, f"params.run={run}")
    made = trained.run("cogvideo_sample")
    assert sorted(samples(made)) == sorted(
        f"{number:06d}.{suffix}" for number in range(5) for suffix in ("gif", "png", "safetensors")
    )
    assert len(animation(made / "samples" / "000003.gif")) == 5
    latent = load_file(made / "samples" / "000003.safetensors")["latent"]
    assert latent.shape == (4, 5, 8, 8) and latent.std() > 0.1
    assert status(made)["result"] == status(run)["result"]  # the same loss, to the last bit

    folder = folder_in(tmp_path / "folder")
    again = folder.script("sample", SAMPLING, MAKING, f"params.run={run}", stop_after=3)
    assert len(list(again.glob("samples/*.gif"))) == 4  # the batch of 2 in which it was told to stop is the last one
    written = {file: file.stat().st_mtime_ns for file in again.glob("samples/*")}
    folder.script("sample", SAMPLING, MAKING, f"params.run={run}")
    assert samples(again) == samples(made)
    assert all(file.stat().st_mtime_ns == when for file, when in written.items())
    assert status(again)["result"] == status(made)["result"]


def test_clips_of_weights_that_the_run_has_no_more_are_made_again(trained: Folder, tmp_path: Path) -> None:
    run, found = shutil.copytree(trained.run("cogvideo"), tmp_path / "run"), []
    for name in ("begun before", "begun after"):
        folder = folder_in(tmp_path / name)
        if name == "begun before":
            folder.script("sample", SAMPLING, MAKING, f"params.run={run}", stop_after=3)
            weights = run / "final" / "model.safetensors"
            state = {key: value + 0.01 * torch.randn_like(value) for key, value in load_file(weights).items()}
            save_file(state, weights, metadata={"format": "pt"})
        found.append(samples(folder.script("sample", SAMPLING, MAKING, f"params.run={run}")))
    assert found[0] == found[1]


def test_sampling_without_a_finished_run_is_refused(tmp_path: Path) -> None:
    folder = folder_in(tmp_path / "folder")
    assert "params.run" in folder.submit(SAMPLING, expect=2)
    printed = folder.submit(SAMPLING, "params.run=nowhere", expect=2)
    assert "nowhere/config.yaml" in printed and "new parameter" not in printed
