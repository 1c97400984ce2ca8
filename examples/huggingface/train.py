"""A small GPT-2 that learns to write Python's documentation, byte by byte, with Hugging Face's Trainer."""

import pydoc_data.topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import jobkit
from jobkit.huggingface import JobkitCallback

LENGTH = 64


class Windows(torch.utils.data.Dataset):
    """Windows of a text; each is shifted by a random number of bytes when it is loaded."""

    def __init__(self, text: bytes) -> None:
        self.ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.ids) // LENGTH - 2

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index * LENGTH + int(torch.randint(LENGTH, ()))
        ids = self.ids[start : start + LENGTH]
        return {"input_ids": ids, "labels": ids}


def train(ctx: jobkit.Context) -> dict[str, float]:
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4)
    config.bos_token_id = config.eos_token_id = 0
    args = TrainingArguments(
        output_dir=str(ctx.run_dir / "outputs"),
        max_steps=ctx.params.steps,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=50,
        use_cpu=ctx.device.type == "cpu",
    )
    data = {"train_dataset": Windows(text[20_000:]), "eval_dataset": Windows(text[:20_000])}
    trainer = Trainer(GPT2LMHeadModel(config), args, **data)
    trainer.add_callback(JobkitCallback(trainer, ctx))
    output = trainer.train()
    return {"train_loss": output.training_loss}


if __name__ == "__main__":  # python train.py, or torchrun train.py
    ctx = jobkit.init(params={"steps": 300})
    ctx.finish(train(ctx))
