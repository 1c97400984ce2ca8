"""A training script in the style of the repositories that the articles run: argparse, init_distributed_mode, DDP, EMA.

TRAIN, LOOP    train.py and train_loop.py, a script that says nothing to jobkit
CHANGES        the lines that jobkit asks for; VALUES one more for each plain value
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

TRAIN = """\
import argparse, os
from pathlib import Path
import numpy as np
import torch, torch.distributed as dist
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from train_loop import train_one_epoch

def init_distributed_mode(args):
    args.distributed = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if not args.distributed:
        return
    args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    args.gpu, args.dist_backend = int(os.environ["LOCAL_RANK"]), "gloo"
    dist.init_process_group(args.dist_backend, args.dist_url, world_size=args.world_size, rank=args.rank)
    dist.barrier()

class Images(Dataset):
    def __init__(self, folder):
        names = sorted(path.name for path in folder.iterdir())
        self.samples = [(file, names.index(file.parent.name)) for file in sorted(folder.glob("*/*.png"))]
    def __len__(self):
        return len(self.samples)
    def __getitem__(self, index):
        file, label = self.samples[index]
        image = torch.from_numpy(np.array(Image.open(file), dtype=np.float32) / 127.5 - 1).flatten()
        return image.flip(0) if torch.rand(()) < 0.5 else image, label

class Flow(nn.Module):
    def __init__(self, size, classes, width=32):
        super().__init__()
        self.embed = nn.Embedding(classes + 1, 8)
        self.net = nn.Sequential(nn.Linear(size + 9, width), nn.SiLU(), nn.Dropout(0.1), nn.Linear(width, size))
    def forward(self, x, t, label):
        return self.net(torch.cat([x, t, self.embed(label)], 1))

class EMA(nn.Module):
    def __init__(self, model, decay=0.99):
        super().__init__()
        self.model, self.decay = model, decay
        self.register_buffer("num_updates", torch.tensor(0))
        copies = (nn.Parameter(p.detach().clone(), requires_grad=False) for p in model.parameters())
        self.shadow = nn.ParameterList(copies)
    def forward(self, *inputs):
        return self.model(*inputs)
    @torch.no_grad()
    def update_ema(self):
        self.num_updates += 1
        decay = min(self.decay, ((1 + self.num_updates) / (10 + self.num_updates)).item())
        for shadow, parameter in zip(self.shadow, self.model.parameters()):
            shadow.lerp_(parameter, 1 - decay)

class NativeScaler(torch.amp.GradScaler):
    def __call__(self, loss, optimizer, parameters, update_grad):
        self.scale(loss).backward()
        if update_grad:
            self.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, 1.0)
            self.step(optimizer)
            self.update()

parser = argparse.ArgumentParser()
parser.add_argument("--data_path", type=Path, required=True)
DEFAULTS = dict(epochs=3, batch_size=4, accum_iter=2, lr=1e-2, seed=0, dist_url="env://", world_size=1)
for name, value in DEFAULTS.items():
    parser.add_argument(f"--{name}", type=type(value), default=value)
parser.add_argument("--local-rank", "--local_rank", type=int, default=-1)
args = parser.parse_args()
init_distributed_mode(args)
rank = args.rank if args.distributed else 0
torch.manual_seed(args.seed + rank)
np.random.seed(args.seed + rank)
dataset = Images(args.data_path)
sampler = DistributedSampler(dataset, num_replicas=args.world_size, rank=rank, shuffle=True)
loader = DataLoader(dataset, sampler=sampler, batch_size=args.batch_size, num_workers=1, drop_last=True)
torch.manual_seed(args.seed)
model = EMA(Flow(dataset[0][0].numel(), 2))
torch.manual_seed(args.seed + rank)
ddp = nn.parallel.DistributedDataParallel(model) if args.distributed else model
optimizer = torch.optim.AdamW(model.model.parameters(), lr=args.lr, betas=(0.9, 0.95))
lr_schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1e-3, total_iters=args.epochs)
loss_scaler = NativeScaler("cpu", init_scale=2.0**10, growth_interval=3)
stats = {"loss": 0.0}
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    train_one_epoch(ddp, model, loader, optimizer, lr_schedule, loss_scaler, stats, args)
    print(f"epoch {epoch}: {stats}", flush=True)
digest = sum(tensor.double().abs().sum().item() for tensor in model.state_dict().values())
print(f"trained: {digest}")
"""

LOOP = """\
import os, time
import torch

def train_one_epoch(ddp, model, loader, optimizer, lr_schedule, loss_scaler, stats, args):
    ddp.train(True)
    stats["loss"] = 0.0
    for data_iter_step, (samples, labels) in enumerate(loader):
        if data_iter_step % args.accum_iter == 0:
            optimizer.zero_grad()
        noise, t = torch.randn_like(samples), torch.rand(len(samples), 1)
        labels = torch.where(torch.rand(len(labels)) < 0.2, 2, labels)
        target = samples - noise
        loss = (ddp(noise + t * target, t, labels) - target).square().mean()
        update = (data_iter_step + 1) % args.accum_iter == 0
        loss_scaler(loss / args.accum_iter, optimizer, model.parameters(), update_grad=update)
        if update:
            model.update_ema()
        stats["loss"] += loss.item() / len(loader)
        while os.path.exists("hold"):
            time.sleep(0.05)
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
    lr_schedule.step()
"""

CHANGES = {
    "import argparse, os\n": "import argparse, os, jobkit\n",
    "(args)\nrank": "(args)\nctx = args.ctx = jobkit.init(params=vars(args))\nrank",
    "for epoch in range(args.epochs):": (
        "for epoch in ctx.epochs(args.epochs, model=model, optimizer=optimizer, lr=lr_schedule, scaler=loss_scaler):"
    ),
    'print(f"trained: {digest}")\n': 'print(f"trained: {digest}")\nctx.finish({"digest": digest, **stats})\n',
    "in enumerate(loader):": "in enumerate(args.ctx.batches(loader), args.ctx.batch):",
}
VALUES = {'stats = {"loss": 0.0}': 'stats = ctx.values(stats={"loss": 0.0}).stats'}


def write(folder: Path, script: str = "train.py") -> None:
    """Write the changed script into a folder, and images into `folder/data/train_64/box/<class>/`."""
    texts = {script: TRAIN, "train_loop.py": LOOP}
    for old, new in [*CHANGES.items(), *VALUES.items()]:
        (name,) = [name for name, text in texts.items() if old in text]
        assert texts[name].count(old) == 1
        texts[name] = texts[name].replace(old, new)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
    random = np.random.default_rng(0)
    for number in range(160):  # more steps than a test takes to interrupt them
        file = folder / "data" / "train_64" / "box" / f"n{number % 2}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (4, 4, 3), dtype=np.uint8)).save(file)
