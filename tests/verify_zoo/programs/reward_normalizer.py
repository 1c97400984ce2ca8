"""Policy gradient on a small environment of its own, with running statistics of the rewards and the observations.

task: reward_normalizer:train
params: {iterations: 24, num_envs: 16, horizon: 8}
steps: 24
forgotten: ret_rms
type: jobkit.attributes(ret_rms, "
"""

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import jobkit


class RunningMeanStd:
    # https://en.wikipedia.org/wiki/Algorithms_for_calculating_variance#Parallel_algorithm
    def __init__(self, shape=(), epsilon=1e-4):
        self.mean = np.zeros(shape, "float64")
        self.var = np.ones(shape, "float64")
        self.count = epsilon

    def update(self, x):
        batch_mean, batch_var, batch_count = np.mean(x, axis=0), np.var(x, axis=0), x.shape[0]
        delta = batch_mean - self.mean
        tot_count = self.count + batch_count
        self.mean = self.mean + delta * batch_count / tot_count
        m_2 = self.var * self.count + batch_var * batch_count
        self.var = (m_2 + np.square(delta) * self.count * batch_count / tot_count) / tot_count
        self.count = tot_count


class Reach:
    """A point on a line goes to a goal; every rollout starts anew."""

    def __init__(self, n):
        self.n = n

    def reset(self):
        self.pos, self.goal = np.zeros(self.n), np.random.uniform(-3, 3, self.n)
        return self.obs()

    def obs(self):
        return np.stack([self.pos, self.goal], 1)

    def step(self, action):
        self.pos = self.pos + 0.5 * (action - 1)
        return self.obs(), -10.0 * np.abs(self.pos - self.goal)


def train(ctx):
    cfg = ctx.params
    env = Reach(cfg.num_envs)
    policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    obs_rms, ret_rms = RunningMeanStd((2,)), RunningMeanStd()
    ctx.track(policy=policy, optimizer=optimizer, obs_rms=jobkit.attributes(obs_rms, "mean", "var", "count"))
    ctx.track(ret_rms=jobkit.attributes(ret_rms, "mean", "var", "count"))  # forgets

    for it in ctx.steps(cfg.iterations):
        obs, returns, logps = env.reset(), np.zeros(cfg.num_envs), []
        for _ in range(cfg.horizon):
            obs_rms.update(obs)
            x = torch.as_tensor((obs - obs_rms.mean) / np.sqrt(obs_rms.var + 1e-8), dtype=torch.float32)
            dist = Categorical(logits=policy(x))
            action = dist.sample()
            logps.append(dist.log_prob(action))
            obs, reward = env.step(action.numpy())
            returns += reward
        ret_rms.update(returns)
        adv = torch.as_tensor((returns - ret_rms.mean) / np.sqrt(ret_rms.var + 1e-8), dtype=torch.float32)
        loss = -(torch.stack(logps).sum(0) * adv.clamp(-5, 5)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.log({"policy_loss": loss, "return": returns.mean()})
        if it % 8 == 0:
            print(f"it {it}: return {returns.mean():.2f}")
    return {"return": float(returns.mean())}
