"""imagenet64: the published model, methods, solvers, FID, data; then one run, samples of it, and its verification."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.runs import Launch, Project
from harness.training import points, result
from omegaconf import OmegaConf
from scipy.linalg import sqrtm

import jobkit
from experiments.imagenet64 import data, discrete, fid, flow, train, unet
from jobkit.config.load import load

ROOT = Path(__file__).parents[2]
UNET: dict[str, Any] = {"width": 8, "multipliers": [1, 2], "blocks": 1, "attention": [2], "head": 8, "dropout": 0.0}
TINY = "unet.width=8 unet.head=8 batch=8 steps=12 held_out=8 solver_steps=1 fid_every=3 fid_samples=20 fid_batch=20"
NETWORK = """\
import torch
class FeatureExtractorInceptionV3(torch.nn.Module):  # in place of torch-fidelity's: no test can download its weights
    __init__ = lambda self, name, features, weights: torch.nn.Module.__init__(self)
    forward = lambda self, images: (images.float().flatten(1)[:, 18:24] / 255,)
"""


def params(words: str) -> list[str]:
    return [f"params.{word}" for word in words.split()]


def test_the_full_recipe_is_the_published_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMAGENET_DIR", "/data")
    config = load(ROOT / "experiments/imagenet64.yaml").config
    assert config.params["data"] == "/data/train_blurred_64/box" and config.resources.world_size == 64
    with torch.device("meta"):
        weights = unet.UNet(3, 1000, **config.params["unet"]).state_dict()
    assert len(weights) == 541 and sum(weight.numel() for weight in weights.values()) == 295_900_035
    assert weights["input_blocks.5.1.qkv.weight"].shape == (3 * 384, 384, 1)


def test_fine_tuning_begins_with_published_weights_and_keeps_new_classes(tmp_path: Path) -> None:
    published, file = unet.UNet(1, 10, **UNET), str(tmp_path / "checkpoint.pth")
    torch.save({"model": published.state_dict(), "args": argparse.Namespace(lr=1e-4)}, file)
    unet.load_initial(net := unet.UNet(1, 3, **UNET), file)
    assert torch.equal(net.middle_block[1].qkv.weight, published.middle_block[1].qkv.weight)
    with pytest.raises(jobkit.UsageError, match=r"params\.init_from.*size mismatch"):
        unet.load_initial(unet.UNet(1, 10, **{**UNET, "width": 16}), file)


@pytest.mark.parametrize("solver", flow.SOLVERS)
def test_solvers_integrate_a_known_field(solver: str) -> None:
    end = flow.integrate(lambda x, t: 2 * t[:, None] + 0 * x, torch.ones(2, 1), solver, steps=4)  # to 1 + t^2
    torch.testing.assert_close(end, torch.full_like(end, 1.75 if solver == "euler" else 2.0))


def test_paths_guidance_times_and_withheld_labels() -> None:
    image = torch.full((1, 1, 1, 1), 255, dtype=torch.uint8)
    x_t, velocity = flow.FlowMatching().path(image, torch.full((1, 1, 1, 1), -3.0), torch.tensor([0.25]))
    assert (x_t.item(), velocity.item()) == (-2.0, 4.0)
    net = unet.UNet(1, 10, **UNET)
    net.forward = lambda x, t, label: x + label.float()[:, None, None, None]  # type: ignore[method-assign]
    output = flow.guided(net, torch.tensor([4]), 0.5)(torch.zeros(1, 1, 1, 1), torch.zeros(1))
    assert output.item() == 1.5 * 4 - 0.5 * net.null_label
    assert flow.random_times(10_000, torch.device("cpu"), skewed=True).median().item() == pytest.approx(0.769, abs=0.02)
    mask = train.withheld(64_000, 0.2, 32, torch.device("cpu")).unflatten(0, (-1, 32))
    assert (mask.all(1) | ~mask.any(1)).all() and mask.float().mean().item() == pytest.approx(0.2, abs=0.05)


def test_discrete_paths_hide_tokens_and_a_perfect_network_draws_the_image() -> None:
    method, image = discrete.DiscreteFlowMatching(17), torch.arange(0, 256, 16, dtype=torch.uint8).view(1, 1, 4, 4)
    hidden, tokens = method.path(image, torch.linspace(0, 0.99, 16).view(1, 1, 4, 4), torch.tensor([0.5]))
    assert (hidden == 17).sum() == 8 and torch.equal(hidden[hidden != 17], tokens[hidden != 17])
    network = method.network(1, 10, UNET)  # type: ignore[arg-type]
    assert network(hidden, torch.tensor([0.5]), torch.tensor([3])).shape == (1, 17, 1, 4, 4)
    logits = 1e4 * torch.nn.functional.one_hot(tokens, 17).movedim(-1, 1).float()
    network.forward = lambda x, t, label: logits.expand(len(x), -1, -1, -1, -1)  # type: ignore[method-assign]
    drawn = method.sample(network, torch.tensor([3]), (1, 4, 4), OmegaConf.create({"guidance": 0.2, "solver_steps": 5}))
    assert (drawn.int() - image.int()).abs().max() <= 8 and method.error(logits, tokens).item() == 0


def test_frechet_distance_is_the_formula_and_sums_of_parts_add_up() -> None:
    features = torch.randn(2, 50, 6) * torch.linspace(1, 3, 6) + torch.tensor([0.0, 0.5])[:, None, None]
    first, second = (fid.gaussian(fid.sums_of(part[:20]) + fid.sums_of(part[20:])) for part in features)
    a, b = features.double().numpy()
    root = sqrtm(np.cov(a.T) @ np.cov(b.T)).real
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(np.cov(a.T) + np.cov(b.T) - 2 * root)
    assert fid.frechet_distance(*first, *second) == pytest.approx(expected, rel=1e-9)
    with pytest.raises(jobkit.UsageError, match=r"params\.inception=PATH"):  # no other distance takes FID's name
        fid.inception("")


def test_images_are_packed_once_and_wrong_ones_are_refused(tmp_path: Path) -> None:
    box = tmp_path / "box"
    for number in range(5):
        data.write_png(box / "ab"[number % 2] / f"{number}.png", torch.full((1, 4, 4), number, dtype=torch.uint8))
    images = data.PackedImages(packed := data.pack(box, 4, 1))
    assert images.classes == ["a", "b"] and [int(images[i][0].max()) for i in range(5)] == [0, 2, 4, 1, 3]
    with pytest.raises(jobkit.UsageError, match="4 x 4 pixels, expected 8 x 8"):
        data.pack(box, 8, 1)
    (box / "c").mkdir()
    assert data.fingerprint(box, 4, 1) != packed.name


def test_a_run_measures_fid_its_samples_score_the_same_and_it_verifies(tmp_path: Path, no_process_left: None) -> None:
    project = Project(tmp_path / "project", plain=False)
    shutil.copytree(ROOT / "experiments", project.folder / "experiments")
    (project.folder / "torch_fidelity").mkdir()
    project.write("torch_fidelity/feature_extractor_inceptionv3.py", NETWORK)
    recipe, sampling, tiny = "experiments/imagenet64.yaml", "experiments/imagenet64_sample.yaml", params(TINY)
    project.environment |= {"IMAGENET_DIR": "/nowhere", "INCEPTION": str(project.write("weights.pth", ""))}
    refused = project.jobkit("submit", recipe, "--local", "resources.gpus_per_task=0", check=False)
    assert refused.returncode == 2 and "/nowhere/train_blurred_64/box" in refused.stderr
    del project.environment["IMAGENET_DIR"]

    def run(*words: str) -> Launch:
        return project.launch(json.loads(project.jobkit("submit", *words, "--local", "--json").stdout)["dir"])

    expected = result(trained := run(recipe, *tiny, "params.steps=3"))  # of averaged weights, as final/ holds them
    assert points(trained, "samples") == points(trained, "validation/loss") == [0, 3]
    scores = result(run(sampling, *params(f"run={trained.run.path} samples=20 batch=20 fid=true solver_steps=1")))
    assert 0 <= scores.pop("recognised") <= 1
    assert scores == {"validation/loss": expected["validation/loss"], "fid": expected["validation/fid"]}
    assert json.loads(project.jobkit("verify", recipe, "--local", "--steps", "10", *tiny, "--json").stdout)["equal"]
