"""Texts from a finished run of minimind, and the cost of all text that the run has not seen.

    python -m jobkit.submit experiments/minimind_generate.yaml --local params.run=runs/minimind-...

`generate` is an experiment like `train`, but for steps: what it has done is on disk as soon as it is done.
"""

from __future__ import annotations

from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import Tensor

import jobkit
from experiments.minimind import held_out_costs, open_data
from experiments.minimind.model import MiniMind
from experiments.minimind.sampling import complete, write_text
from jobkit.train.data import derive_seed
from jobkit.train.exported import load_weights


def generate(ctx: jobkit.Context) -> dict[str, float | str]:
    """Continue each prompt `params.samples` times, into samples/<prompt>_<sample>.txt; the result is as train's."""
    p = ctx.params
    trained = OmegaConf.load(Path(p.run) / "config.yaml").params
    tokenizer, corpus = open_data(ctx, trained)
    net = MiniMind(**trained.model).to(ctx.device)
    load_weights(net, p.run)

    def file(prompt: int, sample: int) -> Path:
        return ctx.run_dir / "samples" / f"{prompt:04d}_{sample:04d}.txt"

    def write(numbers: Tensor, ids: Tensor) -> Tensor:
        (prompt,) = numbers.tolist()
        seed = derive_seed(ctx.seed, "generate", prompt)
        with ctx.autocast():
            texts = complete(
                net,
                tokenizer,
                p.prompts[prompt],
                samples=p.samples,
                **p.sampling,
                window=trained.length,
                seed=seed,
                device=ctx.device,
            )
        for sample, text in enumerate(texts):
            write_text(file(prompt, sample), text)
        return torch.zeros(1)  # a value is asked for; the files are what counts

    ctx.evaluate(write, range(len(p.prompts)), batch_size=1)
    if ctx.is_main:
        print(f"samples: {ctx.run_dir / 'samples'}", flush=True)
    if ctx.is_main:
        for prompt in range(len(p.prompts)):
            ctx.log_text(f"samples/{prompt:04d}", f"```\n{file(prompt, 0).read_text(encoding='utf-8')}```")
    return {**held_out_costs(ctx, net, corpus, trained.length, trained.validate_batch), "corpus": corpus.sha256}
