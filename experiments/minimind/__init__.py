"""A language model in MiniMind's manner, on text in a .jsonl file, or on Python's help texts where there is none.

    python -m jobkit.submit experiments/minimind.yaml --local

`train` is all of the training; what it calls is the model (model), the data (data, tokens, topics) and its voice
(sampling). generate.py writes texts from a finished run, and says how good the model is.
"""

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
    """Train as the YAML's params say; the result is the cost of held-out text, and which text it was."""
    p = ctx.params
    model = ctx.parallelize(MiniMind(**p.model))  # before data are read: one that cannot be spread fails at once
    optimizer = ctx.optimizer(model, torch.optim.AdamW, lr=p.lr, betas=tuple(p.betas), weight_decay=p.weight_decay)
    scheduler = schedule.cosine(optimizer, steps=p.steps, warmup=min(p.warmup, p.steps // 2), floor=p.floor)
    tokenizer, corpus = open_data(ctx, p)
    loader = ctx.loader(corpus.training(p.length), global_batch_size=p.batch, num_workers=p.workers)
    ctx.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)

    def write(prompts: list[str], ids: Tensor) -> list[str]:
        (prompt,) = prompts
        with ctx.autocast():
            return complete(model, tokenizer, prompt, **p.sampling, window=p.length, seed=0, device=ctx.device)

    def validate() -> dict[str, float]:
        costs = held_out_costs(ctx, model, corpus, p.length, p.validate_batch)
        texts = ctx.map(write, [p.prompt], to="main")
        ctx.log({f"validation/{name}": cost for name, cost in costs.items()})
        if ctx.is_main:
            (text,) = texts
            ctx.log_text("sample", f"```\n{text}\n```")
            write_text(ctx.run_dir / "samples" / f"step_{ctx.step:08d}.txt", text)
        return costs

    for step in ctx.steps(p.steps):
        if step % p.validate_every == 0:  # before a batch is drawn: a stop meanwhile leaves the step to be taken again
            validate()
        tokens, target = next(loader)
        loss = ctx.backward(model, tokens, cross_entropy, target, micro_batch_size=p.micro_batch)
        norm = ctx.update(optimizer, max_norm=p.max_norm)
        scheduler.step()
        ctx.log({"train/loss": loss, "train/gradient_norm": norm})
    return {**validate(), "corpus": corpus.sha256}


def open_data(ctx: jobkit.Context, p: DictConfig) -> tuple[Tokenizer, Corpus]:
    """What `p` names: the tokenizer and the packed documents."""
    if p.topics and ctx.is_main:
        write_topics(Path(p.data))
    ctx.barrier()
    tokenizer = open_tokenizer(p.tokenizer, p.end_of_text)
    if tokenizer.vocabulary > p.model.vocabulary:
        raise ValueError(
            f"params.model.vocabulary: found {p.model.vocabulary}, and {p.tokenizer} has {tokenizer.vocabulary} tokens"
        )
    corpus = open_corpus(Path(p.data), tokenizer, p.held_out)
    if ctx.is_main:
        print(
            f"{p.data}: {corpus.documents} documents, {corpus.held_out} held out, sha256 {corpus.sha256[:12]}",
            flush=True,
        )
    return tokenizer, corpus


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cost in nats of tokens [N, T] at logits [N, T, vocabulary]."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def held_out_costs(
    ctx: jobkit.Context, model: Callable[[Tensor], Tensor], corpus: Corpus, length: int, batch_size: int
) -> dict[str, float]:
    """The cost of all held-out text, in windows of `length`: nats a token, and bits a byte.

    The latter does not depend on the tokenizer. The end of a document is a token to be predicted, but no byte.
    """
    windows = corpus.validation(length)

    def nats(batch: tuple[Tensor, Tensor], ids: Tensor) -> Tensor:
        tokens, target = batch
        with ctx.autocast():
            logits = model(tokens)
        return F.cross_entropy(logits.float().transpose(1, 2), target, ignore_index=IGNORED, reduction="none").sum(1)

    total = ctx.evaluate(nats, windows, batch_size=batch_size) * len(windows)
    return {"bits_per_byte": total / math.log(2) / corpus.held_out_bytes, "nats_per_token": total / windows.targets}
