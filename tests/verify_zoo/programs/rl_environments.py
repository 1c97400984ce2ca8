"""REINFORCE in a vector of small environments in numpy: the program goes on in them from update to update.

task: rl_environments:main
params: {updates: 30, num_envs: 8, num_steps: 5}
forgotten: envs
type: jobkit.attributes(envs.rng.bit_generator, "state")
"""

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import jobkit


class VecCorridor:
    """Walk to the goal of a corridor; a wind pushes back. Vectorised over `num_envs`."""

    def __init__(self, num_envs, length=6, max_steps=20):
        self.num_envs = num_envs
        self.length = length
        self.max_steps = max_steps
        self.rng = np.random.default_rng(7)
        self.pos = np.zeros(num_envs, dtype=np.int64)
        self.elapsed = np.zeros(num_envs, dtype=np.int64)
        self.wind = self.rng.uniform(0.0, 0.4, num_envs)

    def _obs(self):
        return np.stack([self.pos / self.length, self.wind, self.elapsed / self.max_steps], 1).astype(np.float32)

    def reset(self):
        self._reset(np.ones(self.num_envs, dtype=bool))
        return self._obs()

    def _reset(self, mask):
        self.pos[mask] = 0
        self.elapsed[mask] = 0
        self.wind[mask] = self.rng.uniform(0.0, 0.4, mask.sum())

    def step(self, action):
        move = np.where(action == 1, 1, -1)
        move[self.rng.random(self.num_envs) < self.wind] = -1
        self.pos = np.clip(self.pos + move, 0, self.length)
        self.elapsed += 1
        reward = np.where(self.pos == self.length, 1.0, -0.02).astype(np.float32)
        done = (self.pos == self.length) | (self.elapsed >= self.max_steps)
        self._reset(done)
        return self._obs(), reward, done


class Agent(nn.Module):
    def __init__(self, obs_dim=3, n_actions=2):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(obs_dim, 32), nn.Tanh(), nn.Linear(32, n_actions))

    def get_action(self, obs):
        dist = Categorical(logits=self.actor(obs))
        action = dist.sample()
        return action, dist.log_prob(action), dist.entropy()


def main(ctx):
    args = ctx.params
    envs = VecCorridor(args.num_envs)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3, eps=1e-5)
    next_obs = torch.from_numpy(envs.reset())
    ctx.track(agent=agent, optimizer=optimizer)
    ctx.track(envs=jobkit.attributes(envs, "pos", "elapsed", "wind"))  # forgets
    ctx.track(rng=jobkit.attributes(envs.rng.bit_generator, "state"))  # forgets
    state = ctx.values(obs=next_obs)

    for _update in ctx.steps(args.updates):
        logprobs, rewards, entropies = [], [], []
        for _ in range(args.num_steps):
            action, logprob, entropy = agent.get_action(state.obs)
            next_obs, reward, _done = envs.step(action.numpy())
            state.obs = torch.from_numpy(next_obs)
            logprobs.append(logprob)
            entropies.append(entropy)
            rewards.append(torch.from_numpy(reward))
        returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
        advantages = (returns - returns.mean()) / (returns.std() + 1e-8)
        loss = -(torch.stack(logprobs) * advantages).mean() - 0.01 * torch.stack(entropies).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        ctx.log({"charts/reward": torch.stack(rewards).mean(), "losses/policy_loss": loss})
    return {"reward": torch.stack(rewards).mean().item()}
