"""The training of minimind: from the YAML's params to its result."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jobkit
from experiments.minimind.data import IGNORED, Packed, open_tokenizer, pack, write_topics
from experiments.minimind.generate import continuation
from experiments.minimind.model import MiniMind


def train(ctx: jobkit.Context) -> dict[str, str]:
    """Train as the YAML's params say. Returns which text that was; the result has the last validation's cost too."""
    p = ctx.params
    with torch.device("meta"):  # `init_weights` draws them on the device, where they are sharded already
        net = MiniMind(**p.model)
    model = ctx.parallelize(net)
    optimizer = ctx.optimizer(model, torch.optim.AdamW, lr=p.lr, betas=tuple(p.betas), weight_decay=p.weight_decay)
    tokenizer = open_tokenizer(p)
    with ctx.main_first():
        if p.topics:
            write_topics(Path(p.data))
        folder = pack(Path(p.data), tokenizer, p.held_out)
    corpus = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    training = Packed(folder / "training.bin", p.length, is_whole=False)
    held_out = Packed(folder / "held_out.bin", p.length, is_whole=True)
    steps = p.steps or math.ceil(p.epochs * len(training) / p.batch)
    scheduler = jobkit.schedule.cosine(optimizer, steps=steps, warmup=p.warmup, floor=p.floor)
    loader = ctx.loader(training, global_batch_size=p.batch, num_workers=p.workers)
    ctx.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)

    def validate() -> dict[str, float]:
        with ctx.evaluating(model, optimizer):
            nats = ctx.evaluate(nats_of(ctx, model), held_out, batch_size=p.validate_batch) * len(held_out)
            texts = ctx.map(continuation(ctx, model, tokenizer, p.sampling, p.length), [p.prompt])
        if ctx.is_main:
            ctx.log_text("sample", f"```\n{texts[0]}\n```")
        # Bits a byte can be compared between tokenizers. The ends of documents are predicted, and are no bytes.
        return {"validation/bits_per_byte": nats / math.log(2) / corpus["held_out_bytes"]}

    for _ in ctx.steps(steps, every={validate: p.validate_every}):
        loss = ctx.backward(model, next(loader), mean_nats, micro_batch_size=p.micro_batch)
        norm = ctx.update(optimizer, max_norm=p.max_norm)
        scheduler.step()
        ctx.log({"train/loss": loss, "train/gradient_norm": norm})
    return {"corpus": corpus["sha256"]}


def mean_nats(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cost of tokens [N, T] at logits [N, T, vocabulary]."""
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def nats_of(ctx: jobkit.Context, model: nn.Module) -> Callable[..., Tensor]:
    """A function for ctx.evaluate: the cost of each sequence, [N]."""

    def nats(batch: tuple[Tensor, Tensor], ids: Tensor) -> Tensor:
        tokens, target = batch
        with ctx.autocast():
            logits = model(tokens)
        cost = F.cross_entropy(logits.float().transpose(1, 2), target, ignore_index=IGNORED, reduction="none")
        return cost.sum(1)

    return nats
