"""Style transfer of a kind: the pixels are what is trained, by LBFGS and a closure.

task: lbfgs:run_style_transfer
params: {num_steps: 24, style_weight: 1.0e+6}
steps: 24
forgotten: optimizer
type: ctx.track(optimizer=optimizer)
"""

import torch
import torch.nn.functional as F
from torch import nn


def gram_matrix(feature):
    b, c, h, w = feature.size()
    flat = feature.view(b * c, h * w)
    return flat @ flat.t() / (b * c * h * w)


def get_features(cnn, image):
    features = []
    for layer in cnn:
        image = layer(image)
        if isinstance(layer, nn.ReLU):
            features.append(image)
    return features


def run_style_transfer(ctx):
    cnn = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU())
    cnn.requires_grad_(False).eval()
    content_img, style_img = torch.rand(1, 3, 12, 12), torch.rand(1, 3, 12, 12)
    content = get_features(cnn, content_img)[-1]
    grams = [gram_matrix(feature) for feature in get_features(cnn, style_img)]

    input_img = content_img.clone().requires_grad_(True)
    ctx.values(input_img=input_img)
    optimizer = torch.optim.LBFGS([input_img], lr=0.5, max_iter=4, history_size=10)
    ctx.track(optimizer=optimizer)  # forgets
    print("Optimizing..")
    for run in ctx.steps(ctx.params.num_steps):

        def closure():
            with torch.no_grad():
                input_img.clamp_(0, 1)
            optimizer.zero_grad()
            features = get_features(cnn, input_img)
            style_score = sum(F.mse_loss(gram_matrix(f), g) for f, g in zip(features, grams, strict=True))
            loss = F.mse_loss(features[-1], content) + ctx.params.style_weight * style_score
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        ctx.log({"loss": loss})
        if run % 10 == 0:
            print(f"run {run}: loss {loss.item():.4f}")
    with torch.no_grad():
        input_img.clamp_(0, 1)
    return {"loss": loss.item(), "mean": input_img.mean().item()}
