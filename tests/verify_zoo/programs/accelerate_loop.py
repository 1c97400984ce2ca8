"""A loop of one's own under accelerate: prepare, accumulate, a linear schedule with a warm-up.

forgotten: lr_scheduler
type: ctx.track(lr_scheduler=lr_scheduler)
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

import jobkit


class ParityDataset(Dataset):
    """Random bits, and whether their number is odd."""

    def __init__(self, n, length=6):
        self.bits = torch.randint(2, (n, length), generator=torch.Generator().manual_seed(n)).float()

    def __len__(self):
        return len(self.bits)

    def __getitem__(self, i):
        return {"input": self.bits[i], "label": self.bits[i].sum().long() % 2}


def get_linear_schedule(optimizer, warmup, total):
    return LambdaLR(optimizer, lambda step: min((step + 1) / warmup, max(0.0, (total - step) / (total - warmup))))


def training_function(config):
    ctx = jobkit.init(params=config)
    set_seed(config["seed"])
    accelerator = Accelerator(cpu=True)
    train_dataloader = DataLoader(ParityDataset(256), shuffle=True, batch_size=config["batch_size"])
    eval_dataloader = DataLoader(ParityDataset(64), batch_size=64)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    lr_scheduler = get_linear_schedule(optimizer, 5, len(train_dataloader) * config["num_epochs"])
    model, optimizer, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, eval_dataloader, lr_scheduler
    )
    ctx.track(model=model, optimizer=optimizer)
    ctx.track(lr_scheduler=lr_scheduler)  # forgets

    # Now we train the model
    for epoch in ctx.epochs(config["num_epochs"]):
        model.train()
        for batch in ctx.batches(train_dataloader):
            loss = nn.functional.cross_entropy(model(batch["input"]), batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            ctx.log({"train_loss": loss.detach(), "lr": lr_scheduler.get_last_lr()[0]})

        model.eval()
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(batch["input"]).argmax(-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["label"]))
            accuracy = (predictions == references).float().mean().item()
        accelerator.print(f"epoch {epoch}: {accuracy}")
    ctx.finish({"accuracy": accuracy})


if __name__ == "__main__":
    training_function({"lr": 1e-2, "num_epochs": 5, "seed": 42, "batch_size": 32})
