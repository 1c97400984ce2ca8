"""How many generated digits does a classifier of real ones recognise? Not part of the training.

    python -m experiments.imagenet64.recognise runs/imagenet64-... [--samples 500]

The classifier is a support vector machine on scikit-learn's digits (right on 97 % of real ones it has not seen).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from sklearn.svm import SVC

from experiments.imagenet64.data import to_uint8
from experiments.imagenet64.flow import guided, integrate
from experiments.imagenet64.unet import UNet


def recognised(net: UNet, p: DictConfig, samples: int) -> float:
    """The part of generated digits, all classes equally often, that are taken for what they were meant to be."""
    label = torch.arange(samples) % 10
    noise = torch.randn(samples, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    net.eval()
    images = to_uint8(integrate(guided(net, label, p.guidance), noise, p.solver, p.solver_steps))
    digits = load_digits()
    classifier = SVC(gamma=0.001).fit(digits.data, digits.target)
    seen = classifier.predict(images.flatten(1).double().numpy() * (16 / 255))  # scikit-learn's pixels go up to 16
    return float((torch.from_numpy(seen) == label).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description="How many generated digits does a classifier of real ones recognise?")
    parser.add_argument("run", type=Path, help="directory of a finished run of the small recipe")
    parser.add_argument("--samples", type=int, default=500)
    arguments = parser.parse_args()
    p = OmegaConf.load(arguments.run / "config.yaml").params
    net = UNet(p.channels, 10, **p.unet)
    net.load_state_dict(load_file(arguments.run / "final" / "model.safetensors"))
    print(f"{recognised(net, p, arguments.samples):.1%} of {arguments.samples} recognised")


if __name__ == "__main__":
    main()
