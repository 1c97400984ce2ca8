"""The published CogVideoX-2b against the experiment's model: names, shapes, outputs, noise schedule; by diffusers."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXDDIMScheduler, CogVideoXTransformer3DModel
from diffusers.models.embeddings import get_3d_sincos_pos_embed
from harness.cogvideo_weights import CHANNELS, FEATURES, WORDS, small_transformer, write_encoders
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from experiments.cogvideo.check import check
from experiments.cogvideo.diffusion import NoiseSchedule, denoise
from experiments.cogvideo.published import load_published, our_name
from experiments.cogvideo.train import network
from experiments.cogvideo.transformer import VideoTransformer, positions
from jobkit import JobkitError
from jobkit.errors import InvalidValue, UsageError
from jobkit.run.experiment import load

ROOT = Path(__file__).parents[2]
SMALL = {"dim": 32, "layers": 2, "heads": 4, "time": 16, "rescale": 1.875}
PUBLISHED = {
    "num_attention_heads": 30,
    "attention_head_dim": 64,
    "in_channels": 16,
    "out_channels": 16,
    "time_embed_dim": 512,
    "text_embed_dim": 4096,
    "num_layers": 30,
    "sample_width": 90,
    "sample_height": 60,
    "sample_frames": 49,
    "patch_size": 2,
    "temporal_compression_ratio": 4,
    "max_text_seq_length": 226,
    "spatial_interpolation_scale": 1.875,
    "temporal_interpolation_scale": 1.0,
    "use_rotary_positional_embeddings": False,
}
"""The 2b's transformer/config.json."""
SCHEDULE = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "snr_shift_scale": 3.0,
    "timestep_spacing": "trailing",
    "clip_sample": False,
    "set_alpha_to_one": True,
}
"""The 2b's scheduler/scheduler_config.json."""


def small_net(**changes: float) -> VideoTransformer:
    return VideoTransformer(channels=CHANNELS, text=FEATURES, **SMALL | changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Weights of a small transformer in several files, as diffusers keeps large ones."""
    small_transformer().save_pretrained(tmp_path / "transformer", max_shard_size="40KB")
    assert len(list((tmp_path / "transformer").glob("*-of-*.safetensors"))) > 2
    return tmp_path / "transformer"


@pytest.mark.parametrize("file", ["cogvideo.yaml", "cogvideo_finetune.yaml"])
def test_every_weight_of_the_published_2b_has_its_place_and_its_shape(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COGVIDEO_DATA", "/data")
    monkeypatch.setenv("COGVIDEO_WEIGHTS", "/weights")
    with torch.device("meta"):
        theirs = CogVideoXTransformer3DModel(**PUBLISHED).state_dict()
        ours = network(OmegaConf.create(load(ROOT / "experiments" / file).config.params)).state_dict()
    mapped = {our_name(name): (tensor.flatten(1) if tensor.dim() == 4 else tensor) for name, tensor in theirs.items()}
    assert mapped.keys() == ours.keys() and len(theirs) == len(ours)
    assert [name for name in ours if mapped[name].shape != ours[name].shape] == []


@pytest.mark.parametrize("files", ["several", "one"])
def test_with_the_weights_of_the_published_class_it_gives_the_same_output(files: str, folder: Path) -> None:
    if files == "one":
        shutil.rmtree(folder)
        small_transformer().half().save_pretrained(folder)  # as the published file is
    theirs = CogVideoXTransformer3DModel.from_pretrained(folder, torch_dtype=torch.float32)
    ours = small_net()
    load_published(ours, folder)
    latent, text, t = torch.randn(2, CHANNELS, 3, 4, 6), torch.randn(2, WORDS, FEATURES), torch.tensor([0, 999])
    with torch.no_grad():
        expected = theirs(latent.transpose(1, 2), text, t).sample.transpose(1, 2)
        velocity = ours(latent, t, text)
    assert expected.std() > 0.5
    assert torch.allclose(velocity, expected, atol=1e-5)


def test_positions_of_the_full_size_are_the_published_ones() -> None:
    theirs = get_3d_sincos_pos_embed(1920, (45, 30), 13, 1.875, 1.0).flatten(0, 1)
    ours = positions(13, 30, 45, 1920, torch.device("cpu"), rescale=1.875)
    assert torch.allclose(ours, theirs.float(), atol=1e-5)


def test_the_noise_schedule_and_the_sampler_are_the_published_ones() -> None:
    scheduler, ours = CogVideoXDDIMScheduler(**SCHEDULE), NoiseSchedule(3.0)
    assert torch.allclose(ours.alpha**2, scheduler.alphas_cumprod.float(), atol=1e-6)
    noise = torch.randn(1, 8, generator=torch.Generator().manual_seed(0))
    scheduler.set_timesteps(50)
    x = noise
    for t in scheduler.timesteps:
        x = scheduler.step(torch.sin(3 * x), t, x).prev_sample  # any function of x
    found = denoise(lambda x, t: torch.sin(3 * x), noise, ours, 50)
    assert torch.allclose(found, x, atol=1e-4)


def test_the_loss_is_the_weighted_error_of_the_data_that_theirs_is() -> None:
    scheduler, ours = CogVideoXDDIMScheduler(**SCHEDULE), NoiseSchedule(3.0)
    x0, noise, output, t = (*torch.randn(3, 2, 8), torch.tensor([50, 900]))
    x_t, velocity = ours.noisy(x0, noise, t)
    assert torch.allclose(x_t, scheduler.add_noise(x0, noise, t), atol=1e-5)
    data = scheduler.get_velocity(output, x_t, t)  # how their trainer gets data of an output
    theirs = (data - x0).square() / (1 - scheduler.alphas_cumprod[t])[:, None]
    assert torch.allclose((output - velocity).square(), theirs.float(), atol=1e-4)


def test_an_index_that_cannot_be_read_just_now_does_not_end_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unlike one that is wrong: a disk that is away may be back for the next attempt."""
    read_text = Path.read_text

    def read(path: Path, **options: Any) -> str:
        if path.name.endswith(".index.json"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read_text(path, **options)

    monkeypatch.setattr(Path, "read_text", read)
    with pytest.raises(JobkitError, match="Input/output error") as raised:
        load_published(small_net(), folder)
    assert not isinstance(raised.value, UsageError)


def test_weights_of_another_shape_or_model_and_missing_ones_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(JobkitError, match=r"nowhere/config\.json cannot be read"):
        load_published(small_net(), tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"norm_final\.bias is 32, expected 48 \(velocity\.norm\.bias\)"):
        load_published(small_net(dim=48, heads=4), folder)
    with pytest.raises(UsageError, match=r"spatial_interpolation_scale: found 1\.875, expected 1\.0"):
        load_published(small_net(rescale=1.0), folder)
    with pytest.raises(UsageError, match=r"transformer_blocks\.1\.\S+ is nothing that this model has"):
        load_published(small_net(layers=1), folder)
    with pytest.raises(UsageError, match=r"no weights for block_2\.\S+ in it, and for 23 more"):
        load_published(small_net(layers=3), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"use_rotary_positional_embeddings": True}))
    with pytest.raises(UsageError, match="use_rotary_positional_embeddings: found True, expected False"):
        load_published(small_net(), folder)


@pytest.mark.parametrize("files", ["several", "one"])
def test_what_weights_are_of_is_looked_at_before_anything_is_queued(files: str, folder: Path) -> None:
    if files == "one":
        shutil.rmtree(folder)
        small_transformer().save_pretrained(folder)
    model = SMALL | {"patch": 2}
    params = {"start": str(folder), "latent": [CHANNELS, 3, 4, 6], "text": [WORDS, FEATURES], "model": model}

    def refused(says: str, **changes: Any) -> None:
        with pytest.raises(InvalidValue, match=rf"^params\.start: .*{re.escape(says)}"):
            check(params | changes)

    check(params)
    for changes, says in [
        ({"layers": 3}, "config.json: num_layers: found 2, expected 3"),
        ({"dim": 48}, "attention_head_dim: found 8, expected 12"),
        ({"time": 24}, "time_embed_dim: found 16, expected 24"),
        ({"rescale": 1.0}, "spatial_interpolation_scale: found 1.875, expected 1.0"),
    ]:
        refused(says, model=model | changes)
    refused("in_channels: found 4, expected 16", latent=[16, 3, 4, 6])
    refused("text_embed_dim: found 12, expected 4096", text=[226, 4096])

    config = json.loads((folder / "config.json").read_text())
    for other, says in [
        (
            small_transformer(attention_head_dim=16),
            "patch_embed.proj.weight is 64 x 4 x 2 x 2, expected 32",
        ),
        (small_transformer(num_layers=1), "no transformer_blocks.1.attn1.norm_q.weight in its files"),
        (small_transformer(num_layers=3), "transformer_blocks.2."),
    ]:  # the weights of another model beside this one's config.json
        shutil.rmtree(folder)
        other.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(config))
        refused(says)

    file = max(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    refused(f"{file.name}: torn: ")


def test_a_decoder_for_other_latents_is_refused_before_anything_is_queued(tmp_path: Path) -> None:
    vae = write_encoders(tmp_path) / "vae"
    check({"vae": str(vae), "latent": [CHANNELS, 3, 4, 6]})
    with pytest.raises(InvalidValue, match=r"params\.vae: .*config\.json: latent_channels: found 4, expected 16"):
        check({"vae": str(vae), "latent": [16, 3, 4, 6]})
    (file,) = vae.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InvalidValue, match=rf"params\.vae: .*{file.name}: torn: "):
        check({"vae": str(vae)})
    small_transformer().save_pretrained(vae)
    with pytest.raises(InvalidValue, match="_class_name: found CogVideoXTransformer3DModel, expected Auto"):
        check({"vae": str(vae)})


def test_a_broken_or_missing_file_of_weights_is_named(folder: Path) -> None:
    file = max(folder.glob("*-of-*.safetensors"))
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    with pytest.raises(JobkitError, match=f"{file.name}: no {name} can be read from it"):
        load_published(small_net(), folder)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(JobkitError, match=f"{file.name}: no .* can be read from it"):
        load_published(small_net(), folder)
    (folder / "diffusion_pytorch_model.safetensors.index.json").unlink()
    with pytest.raises(JobkitError, match=r"diffusion_pytorch_model\.safetensors cannot be read"):
        load_published(small_net(), folder)


def test_the_published_autoencoder_makes_latents_of_the_recipes_size_and_videos_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COGVIDEO_DATA", "/data")
    latent = load(ROOT / "experiments" / "cogvideo.yaml").config.params["latent"]
    with torch.device("meta"):
        vae = AutoencoderKLCogVideoX(
            down_block_types=4 * ("CogVideoXDownBlock3D",),
            up_block_types=4 * ("CogVideoXUpBlock3D",),
            block_out_channels=(128, 256, 256, 512),
            latent_channels=16,
            layers_per_block=3,
        )
        assert list(vae.encode(torch.empty(1, 3, 49, 480, 720)).latent_dist.mean.shape) == [1, *latent]
        assert vae.decode(torch.empty(1, *latent)).sample.shape == (1, 3, 49, 480, 720)
