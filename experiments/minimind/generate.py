"""Texts from a finished run of minimind, and the cost of all text that the run has not seen.

    python -m jobkit.submit experiments/minimind_generate.yaml --local params.run=runs/minimind-...

`generate` is an experiment like `train`, but for steps: what it has done is on disk as soon as it is done.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf
from torch import Tensor

import jobkit
from experiments.minimind.model import MiniMind
from experiments.minimind.sampling import complete, write_text
from experiments.minimind.train import held_out_costs, open_data
from jobkit.errors import UsageError
from jobkit.run.rundir import RunDir
from jobkit.train.exported import load_weights
from jobkit.train.seeds import derive_seed


def generate(ctx: jobkit.Context) -> dict[str, float | str]:
    """Continue each prompt `params.samples` times, into samples/<prompt>_<sample>.txt; the result is as train's."""
    p = ctx.params
    trained = OmegaConf.load(Path(p.run) / "config.yaml").params
    tokenizer, corpus = open_data(ctx, trained)
    if (RunDir(p.run).status().result or {}).get("tokenizer", corpus.tokenizer) != corpus.tokenizer:
        raise UsageError(f"{trained.tokenizer}: not the tokenizer that {p.run} was trained with")
    net = MiniMind(**trained.model).to(ctx.device)
    load_weights(net, p.run)

    def file(prompt: int, sample: int) -> Path:
        return ctx.run_dir / "samples" / f"{prompt:04d}_{sample:04d}.txt"

    def write(prompts: list[str], ids: Tensor) -> list[list[str]]:
        (prompt,), (number,) = prompts, ids.tolist()
        seed = derive_seed(ctx.seed, "generate", number)
        with ctx.autocast():
            texts = complete(
                net,
                tokenizer,
                prompt,
                samples=p.samples,
                **p.sampling,
                window=trained.length,
                seed=seed,
                device=ctx.device,
            )
        for sample, text in enumerate(texts):
            write_text(file(number, sample), text)
        return [texts]

    written = ctx.map(write, list(p.prompts), to="main")
    if ctx.is_main:
        print(f"samples: {ctx.run_dir / 'samples'}", flush=True)
        for number, texts in enumerate(written):
            ctx.log_text(f"samples/{number:04d}", f"```\n{texts[0]}\n```")
    return {**held_out_costs(ctx, net, corpus, trained), "corpus": corpus.sha256, "tokenizer": corpus.tokenizer}
