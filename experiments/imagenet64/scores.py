"""How good are generated images? Answers that need no network from elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.imagenet64.flow import to_unit


def recognised(images: Tensor, label: Tensor) -> float:
    """The part of digits, uint8 [N, 1, 8, 8], that a classifier of real ones takes for their labels [N].

    The classifier is a support vector machine on scikit-learn's digits (right on 97 % of real ones it has not seen).
    """
    from sklearn.datasets import load_digits  # here, as ImageNet needs no scikit-learn
    from sklearn.svm import SVC

    digits = load_digits()
    classifier = SVC(gamma=0.001).fit(digits.data, digits.target)
    seen = classifier.predict(images.flatten(1).double().numpy() * (16 / 255))  # scikit-learn's pixels go up to 16
    return float((torch.from_numpy(seen) == label).double().mean())


def pixel_frechet_distance(images: Tensor, others: Tensor) -> float:
    """Frechet distance of the Gaussians fitted to two sets of images, uint8 [N, C, R, R], as pixels in [-1, 1].

    Images above 8 x 8 are averaged down to that. It is not FID, whose Gaussians are fitted to a classifier's features:
    it sees layout and colour but no detail, and compares with itself alone.
    """
    gaussians = []
    for one in (images, others):
        pixels = F.adaptive_avg_pool2d(to_unit(one), min(8, one.shape[-1])).flatten(1).double()
        gaussians += [pixels.mean(0), pixels.T.cov()]
    return frechet_distance(*gaussians)


def frechet_distance(mean: Tensor, covariance: Tensor, other_mean: Tensor, other_covariance: Tensor) -> float:
    """Of two Gaussians, means [F] and covariances [F, F] in float64: Dowson and Landau 1982.

    It is |m1 - m2|^2 + trace(C1 + C2 - 2 (C1 C2)^(1/2)). Where a covariance is singular, as that of fewer samples than
    features, eigenvalues of the product that rounding makes negative have no real root and count as 0.
    """
    roots = torch.linalg.eigvals(covariance @ other_covariance).sqrt().real.sum()
    return float((mean - other_mean).square().sum() + covariance.trace() + other_covariance.trace() - 2 * roots)
