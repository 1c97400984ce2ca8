"""Text from a language model: one token after the other, each drawn from what the model expects next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from experiments.minimind.tokens import Tokenizer
from jobkit.run.files import write_atomic


@torch.no_grad()
def complete(
    model: Callable[[Tensor], Tensor],
    tokenizer: Tokenizer,
    prompt: str,
    *,
    samples: int = 1,
    new_tokens: int,
    temperature: float,
    top_k: int,
    window: int,
    seed: int,
    device: torch.device,
) -> list[str]:
    """`samples` texts that begin with `prompt` and go on for up to `new_tokens` tokens, or until the text ends.

    `temperature` 0 takes the likeliest token always; `top_k` draws among so many, 0 among all. The model is given the
    last `window` tokens at most. Random numbers come from `seed` alone.
    """
    generator = torch.Generator().manual_seed(seed)  # on the CPU: the same numbers whatever the device
    start = [tokenizer.begin, *tokenizer.encode([prompt])[0]]
    tokens = torch.tensor(start, device=device).repeat(samples, 1)
    ended = torch.zeros(samples, dtype=torch.bool)
    while tokens.shape[1] < len(start) + new_tokens and not ended.all():
        logits = model(tokens[:, -window:])[:, -1].float().cpu()
        token = draw(logits, temperature, top_k, generator).masked_fill(ended, tokenizer.end)
        ended |= token == tokenizer.end
        tokens = torch.cat([tokens, token[:, None].to(device)], dim=1)
    return [prompt + tokenizer.decode(_until(tokenizer.end, row[len(start) :])) for row in tokens.tolist()]


def draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    """A token [N] for each row of logits [N, vocabulary]."""
    if temperature == 0:
        return logits.argmax(-1)
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]


def write_text(file: Path, text: str) -> None:
    """Write a text; the file appears whole, in a folder that is made where there is none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, text + "\n", durable=False)


def _until(end: int, tokens: Sequence[int]) -> Sequence[int]:
    return tokens[: tokens.index(end)] if end in tokens else tokens
