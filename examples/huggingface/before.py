"""A script of Hugging Face's Trainer."""

import argparse

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed


class Sums(torch.utils.data.Dataset):
    def __init__(self, samples, seed):
        self.x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        return {"x": x + 0.1 * torch.randn(8), "labels": (x[:4] * x[4:]).sum(0, keepdim=True)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def forward(self, x, labels):
        output = self.layers(x)
        return {"loss": nn.functional.mse_loss(output, labels), "logits": output}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()

    set_seed(1)
    training_args = TrainingArguments(
        output_dir="output",
        num_train_epochs=args.epochs,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=args.lr,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        seed=1,
    )
    trainer = Trainer(Net(), training_args, train_dataset=Sums(192, seed=1), eval_dataset=Sums(64, seed=2))
    trainer.train()
    trainer.save_model("model")


if __name__ == "__main__":
    main()
