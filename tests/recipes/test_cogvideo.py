"""The recipe cogvideo: its model against the published one, its noise, its data, and a run with its clips."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from recipes.test_minimind import NEXT, recipe_project
from safetensors.torch import save_file

import jobkit
from experiments.cogvideo.codec import Autoencoder, SpaceToDepth
from experiments.cogvideo.data import Clips, split
from experiments.cogvideo.diffusion import STEPS, NoiseSchedule, denoise, fixed_noise, guided, spread_steps
from experiments.cogvideo.published import load_published, our_name
from experiments.cogvideo.transformer import VideoTransformer

TINY = {"dim": 32, "layers": 2, "heads": 4, "time": 16, "patch": 2, "rescale": 1.875, "recompute": True}
SMALL = [f"params.{word}" for word in ("model.dim=24", "model.layers=1", "batch=4", "micro_batch=1", "held_out=6",
         "warmup=2", "denoising_steps=2", "samples=3", "ema_decay=0")]  # fmt: skip
CPU = torch.device("cpu")


def tiny(seed: int = 0, **changes: object) -> VideoTransformer:
    torch.manual_seed(seed)
    net = VideoTransformer(16, 24, **{**TINY, **changes})
    with torch.no_grad():
        for parameter in net.parameters():  # what starts as zeros or ones would hide mistakes
            parameter.add_(0.1 * torch.randn_like(parameter))
    return net


def test_the_full_model_has_1694_million_parameters() -> None:
    for recipe in ("cogvideo", "cogvideo_finetune"):
        p = OmegaConf.load(NEXT / f"experiments/{recipe}.yaml").params
        with torch.device("meta"):
            net = VideoTransformer(p.latent[0], p.text[1], **p.model)
        assert sum(parameter.numel() for parameter in net.parameters()) == 1_693_783_872


def test_published_weights_load_by_their_names(tmp_path: Path) -> None:
    block = "norm1.linear norm1.norm norm2.linear norm2.norm attn1.to_q attn1.to_k attn1.to_v attn1.norm_q"
    block += " attn1.norm_k attn1.to_out.0 ff.net.0.proj ff.net.2"
    whole = "patch_embed.proj patch_embed.text_proj time_embedding.linear_1 time_embedding.linear_2"
    whole += " norm_final norm_out.linear norm_out.norm proj_out"
    modules = whole.split() + [f"transformer_blocks.{i}.{module}" for i in range(2) for module in block.split()]
    net, other = tiny(), tiny(seed=1)
    names = {our_name(name): name for module in modules for name in (f"{module}.weight", f"{module}.bias")}
    assert names.keys() == net.state_dict().keys()
    weights = {names[name]: weight for name, weight in net.state_dict().items()}
    weights["patch_embed.proj.weight"] = weights["patch_embed.proj.weight"].unflatten(1, (16, 2, 2))
    save_file(weights, tmp_path / "diffusion_pytorch_model.safetensors")
    config = {"num_attention_heads": 4, "spatial_interpolation_scale": 1.875}
    (tmp_path / "config.json").write_text(json.dumps(config))
    load_published(other, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    for change, key in (({"heads": 2}, "num_attention_heads"), ({"layers": 3}, "block_2"), ({"layers": 1}, "blocks.1")):
        with pytest.raises(jobkit.UsageError, match=key):
            load_published(tiny(**change), tmp_path)


def test_the_transformer_computes_what_the_published_one_computes(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    sizes = {"num_attention_heads": 4, "attention_head_dim": 8, "time_embed_dim": 16, "text_embed_dim": 24,
             "num_layers": 2, "sample_width": 12, "sample_height": 8, "sample_frames": 9, "max_text_seq_length": 5,
             "spatial_interpolation_scale": 1.875}  # fmt: skip
    theirs = diffusers.CogVideoXTransformer3DModel(**sizes).eval()
    theirs.save_pretrained(tmp_path)
    net = tiny()
    load_published(net, tmp_path)
    latent, text, t = torch.randn(2, 16, 3, 8, 12), torch.randn(2, 5, 24), torch.tensor([3, 900])
    with torch.no_grad():
        (expected,) = theirs(latent.transpose(1, 2), text, t, return_dict=False)
        assert torch.allclose(net(latent, t, text), expected.transpose(1, 2), atol=1e-5)
    vae = diffusers.AutoencoderKLCogVideoX(block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4)
    vae.save_pretrained(tmp_path / "vae")
    codec = Autoencoder(str(tmp_path / "vae"), CPU)
    latent = codec.encode(torch.randint(256, (9, 3, 64, 96), dtype=torch.uint8))
    assert latent.shape == (16, 3, 8, 12) and codec.decode(latent).shape == (9, 3, 64, 96)


def test_the_noise_ends_with_a_signal_of_zero_and_steps_are_spread() -> None:
    schedule = NoiseSchedule(3.0, CPU)
    snr = (schedule.alpha / schedule.sigma).square()
    assert snr[-1] == 0 and snr[0] > 100 and (snr.diff() < 0).all()
    t = spread_steps(8, CPU)
    assert t.dtype == torch.int64 and (t * 8 // STEPS).tolist() == list(range(8))


def test_space_to_depth_loses_nothing_and_a_broken_clip_is_refused(tmp_path: Path) -> None:
    frames = torch.randint(256, (5, 1, 16, 16), dtype=torch.uint8)
    latent, file = SpaceToDepth().encode(frames), tmp_path / "a.safetensors"
    assert latent.shape == (4, 5, 8, 8) and torch.equal(SpaceToDepth().decode(latent), frames)
    save_file({"latent": latent, "text": torch.zeros(2, 16)}, file)
    assert torch.equal(Clips(tmp_path, [4, 5, 8, 8], [2, 16])[0][0], latent)
    with pytest.raises(jobkit.UsageError, match=r"a\.safetensors: text: found \[2, 16\], expected \[3, 16\]"):
        Clips(tmp_path, [4, 5, 8, 8], [3, 16])[0]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(jobkit.UsageError, match=r"a\.safetensors"):
        Clips(tmp_path, [4, 5, 8, 8], [2, 16])[0]


def test_a_run_is_exact_and_its_clips_are_those_of_a_serial_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_process_left: None
) -> None:
    project = recipe_project(tmp_path / "project", "cogvideo", monkeypatch)
    yaml = "experiments/cogvideo.yaml"
    report = json.loads(project.jobkit("verify", yaml, *SMALL, "--local", "--steps", "9", "--json").stdout)
    assert report["equal"] and "evaluation" not in report["missing"], report
    project.jobkit("submit", yaml, *SMALL, "params.steps=6", "--local")
    (path,) = project.folder.glob("runs/cogvideo-*")
    assert len(list(path.glob("samples/step_00000006/*.pt"))) == 3 and (path / "samples/step_00000006.gif").exists()
    words = [f"params.run={path}", "params.clips=4", "params.batch=1", "params.denoising_steps=2"]
    project.jobkit("submit", "experiments/cogvideo_sample.yaml", *words, "--local")
    (sampled,) = project.folder.glob("runs/cogvideo_sample-*")
    assert len(list(sampled.glob("samples/*.gif"))) == 4

    run, p = jobkit.open_run(path), OmegaConf.create(jobkit.open_run(path).params)
    assert project.launch(sampled).status.result == run.result  # the same weights and clips
    net = VideoTransformer(4, 16, **p.model)
    net.load_state_dict(run.weights())
    _, held_out = split(Clips(project.folder / p.data, p.latent, p.text), p.held_out)
    for i in range(4):
        latent, text = (tensor[None] for tensor in held_out[i])
        noise, _ = fixed_noise(torch.tensor([i]), latent)
        expected = denoise(guided(net, text, 2.0), noise, NoiseSchedule(p.snr_shift, CPU), steps=2)
        (drawn,) = torch.load(sampled / f"samples/batch_{i:08d}.pt")["latents"]
        assert torch.allclose(drawn, expected[0], atol=1e-5)
