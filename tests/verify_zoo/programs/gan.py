"""A DCGAN-like script on points of a ring: two networks, two optimizers, fixed noise to look at.

forgotten: netD
type: ctx.track(netD=netD)
"""

import random

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader

import jobkit

# Size of z latent vector (i.e. size of generator input)
nz = 8
ngf = ndf = 32
lr = 0.002
beta1 = 0.5
num_epochs = 6
real_label, fake_label = 1.0, 0.0

ctx = jobkit.init(params={"lr": lr, "num_epochs": num_epochs})
manualSeed = 999
random.seed(manualSeed)
torch.manual_seed(manualSeed)


def weights_init(m):
    if isinstance(m, nn.Linear):
        nn.init.normal_(m.weight, 0.0, 0.2)


angles = torch.rand(320) * 2 * torch.pi
dataloader = DataLoader(torch.stack([angles.cos(), angles.sin()], 1), batch_size=64, shuffle=True)

netG = nn.Sequential(nn.Linear(nz, ngf), nn.BatchNorm1d(ngf), nn.ReLU(True), nn.Linear(ngf, 2))
netD = nn.Sequential(nn.Linear(2, ndf), nn.LeakyReLU(0.2, inplace=True), nn.Dropout(0.2), nn.Linear(ndf, 1))
netG.apply(weights_init)
netD.apply(weights_init)

criterion = nn.BCEWithLogitsLoss()
fixed_noise = torch.randn(16, nz)
optimizerD = optim.Adam(netD.parameters(), lr=lr, betas=(beta1, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=lr, betas=(beta1, 0.999))
ctx.track(netG=netG, optimizerG=optimizerG)
ctx.track(netD=netD, optimizerD=optimizerD)  # forgets

for epoch in ctx.epochs(num_epochs):
    for i, real in enumerate(ctx.batches(dataloader), ctx.batch):
        # (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        label = torch.full((real.size(0), 1), real_label)
        errD_real = criterion(netD(real), label)
        errD_real.backward()
        fake = netG(torch.randn(real.size(0), nz))
        label.fill_(fake_label)
        errD_fake = criterion(netD(fake.detach()), label)
        errD_fake.backward()
        errD = errD_real + errD_fake
        optimizerD.step()

        # (2) Update G network: maximize log(D(G(z)))
        netG.zero_grad()
        label.fill_(real_label)
        errG = criterion(netD(fake), label)
        errG.backward()
        optimizerG.step()

        print(f"[{epoch}/{num_epochs}][{i}/{len(dataloader)}] Loss_D: {errD.item():.4f} Loss_G: {errG.item():.4f}")
        ctx.log({"Loss_D": errD, "Loss_G": errG})

with torch.no_grad():
    fake = netG.eval()(fixed_noise)
ctx.finish({"radius": fake.norm(dim=1).mean().item()})
