"""All of the training, on a corpus and a model that the YAML describes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.nn import functional as F

import jobkit
from experiments.minimind.data import IGNORED, Corpus, open_corpus
from experiments.minimind.model import MiniMind
from experiments.minimind.sampling import complete, write_text
from experiments.minimind.tokens import Tokenizer, open_tokenizer
from experiments.minimind.topics import write_topics
from jobkit.train import schedule


def train(ctx: jobkit.Context) -> dict[str, float | str]:
    """Train as the YAML's params say; the result is the cost of held-out text, and which text and tokenizer."""
    p = ctx.params
    model = ctx.parallelize(MiniMind(**p.model))  # before data are read: one that cannot be spread fails at once
    optimizer = ctx.optimizer(model, torch.optim.AdamW, lr=p.lr, betas=tuple(p.betas), weight_decay=p.weight_decay)
    tokenizer, corpus = open_data(ctx, p)
    samples = corpus.training(p.length, p.packed)
    steps = p.steps or math.ceil(p.epochs * len(samples) / p.batch)
    scheduler = schedule.cosine(optimizer, steps=steps, warmup=min(p.warmup, steps // 2), floor=p.floor)
    loader = ctx.loader(samples, global_batch_size=p.batch, num_workers=p.workers)
    ctx.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, corpus=corpus)

    def write(prompts: list[str], ids: Tensor) -> list[str]:
        (prompt,) = prompts
        with ctx.autocast():
            return complete(model, tokenizer, prompt, **p.sampling, window=p.length, seed=0, device=ctx.device)

    def validate() -> dict[str, float]:
        costs = held_out_costs(ctx, model, corpus, p)
        texts = ctx.map(write, [p.prompt], to="main")
        ctx.log({f"validation/{name}": cost for name, cost in costs.items()})
        if ctx.is_main:
            (text,) = texts
            ctx.log_text("sample", f"```\n{text}\n```")
            write_text(ctx.run_dir / "samples" / f"step_{ctx.step:08d}.txt", text)
        return costs

    for step in ctx.steps(steps):
        if step % p.validate_every == 0:  # before a batch is drawn: a stop meanwhile leaves the step to be taken again
            validate()
        tokens, target = next(loader)
        loss = ctx.backward(model, tokens, cross_entropy, target, micro_batch_size=p.micro_batch)
        norm = ctx.update(optimizer, max_norm=p.max_norm)
        scheduler.step()
        ctx.log({"train/loss": loss, "train/gradient_norm": norm})
    return {**validate(), "corpus": corpus.sha256, "tokenizer": corpus.tokenizer}


def open_data(ctx: jobkit.Context, p: DictConfig) -> tuple[Tokenizer, Corpus]:
    """What `p` names: the tokenizer and the documents."""
    if p.topics and ctx.is_main:
        write_topics(Path(p.data))
    ctx.barrier()
    tokenizer = open_tokenizer(p.tokenizer, p.begin_of_text, p.end_of_text, p.model.vocabulary)
    corpus = open_corpus(Path(p.data), tokenizer, p.held_out, ctx.heartbeat)
    if ctx.is_main:
        print(
            f"{p.data}: {corpus.documents} documents, {corpus.held_out} held out, sha256 {corpus.sha256[:12]}",
            flush=True,
        )
    return tokenizer, corpus


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cost in nats of tokens [N, T] at logits [N, T, vocabulary]; those that are IGNORED count for nothing."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def held_out_costs(
    ctx: jobkit.Context, model: Callable[[Tensor], Tensor], corpus: Corpus, p: DictConfig
) -> dict[str, float]:
    """The cost of all held-out text, in the samples that `p` describes: nats a token, and bits a byte.

    The latter does not depend on the tokenizer. The end of a document is a token to be predicted, but no byte.
    """
    samples = corpus.validation(p.length, p.packed)

    def nats(batch: tuple[Tensor, Tensor], ids: Tensor) -> Tensor:
        tokens, target = batch
        with ctx.autocast():
            logits = model(tokens)
        return F.cross_entropy(logits.float().transpose(1, 2), target, ignore_index=IGNORED, reduction="none").sum(1)

    total = ctx.evaluate(nats, samples, batch_size=p.validate_batch) * len(samples)
    return {"bits_per_byte": total / math.log(2) / corpus.held_out_bytes, "nats_per_token": total / samples.targets}
