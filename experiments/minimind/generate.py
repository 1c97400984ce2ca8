"""Text from a language model, one token after the other; and from a finished run, as samples/<number>.txt.

python -m jobkit.submit experiments/minimind_generate.yaml --local params.run=runs/minimind-...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

import jobkit
from experiments.minimind.data import Bytes, Tokenizer, open_tokenizer
from experiments.minimind.model import MiniMind


def generate(ctx: jobkit.Context) -> dict[str, int]:
    """Continue each prompt `params.samples` times; the prompts are drawn over the ranks."""
    p, run = ctx.params, jobkit.open_run(ctx.params.run)
    trained = OmegaConf.create(run.params)
    tokenizer = open_tokenizer(trained)
    net = MiniMind(**trained.model)
    net.load_state_dict(run.weights())
    net.to(ctx.device).eval()
    prompts = [prompt for prompt in p.prompts for _ in range(p.samples)]
    texts = ctx.map(continuation(ctx, net, tokenizer, p.sampling, trained.length), prompts)
    if ctx.is_main:
        folder = ctx.run_dir / "samples"
        folder.mkdir(exist_ok=True)
        for number, text in enumerate(texts):
            (folder / f"{number:04d}.txt").write_text(text + "\n", encoding="utf-8")
            ctx.log_text(f"samples/{number:04d}", f"```\n{text}\n```")
    return {"texts": len(prompts)}


def continuation(
    ctx: jobkit.Context, model: nn.Module, tokenizer: Bytes | Tokenizer, sampling: DictConfig, window: int
) -> Callable[..., str]:
    """A function for ctx.map, which seeds the draws of each prompt: the prompt and how it goes on.

    `sampling` has new_tokens, temperature and top_k (1 takes the likeliest token, 0 draws among all of them). The model
    sees the last `window` tokens.
    """

    def text(prompts: Sequence[str], ids: Tensor) -> str:
        start = [tokenizer.begin, *tokenizer.encode(prompts[0])]
        tokens = torch.tensor([start], device=ctx.device)
        while tokens.shape[1] < len(start) + sampling.new_tokens and tokens[0, -1] != tokenizer.end:
            with ctx.autocast():
                logits = model(tokens[:, -window:])[0, -1].float()
            values, candidates = logits.topk(sampling.top_k or len(logits))
            drawn = torch.multinomial((values / sampling.temperature).softmax(0), 1)
            tokens = torch.cat([tokens, candidates[drawn][None]], dim=1)
        return prompts[0] + tokenizer.decode(tokens[0, len(start) :].tolist())

    return text
