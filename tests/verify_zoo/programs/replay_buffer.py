"""A DQN in one script: a ring of preallocated arrays, a target network, epsilon from the step.

forgotten: rb
type: jobkit.attributes(rb, "obs_buf", "next_obs_buf", "acts_buf", "rews_buf", "ptr", "size")
"""

import argparse
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import jobkit


class ReplayBuffer:
    def __init__(self, obs_dim, size):
        self.obs_buf = np.zeros([size, obs_dim], dtype=np.float32)
        self.next_obs_buf = np.zeros([size, obs_dim], dtype=np.float32)
        self.acts_buf = np.zeros([size], dtype=np.int64)
        self.rews_buf = np.zeros([size], dtype=np.float32)
        self.ptr, self.size, self.max_size = 0, 0, size

    def store(self, obs, act, rew, next_obs):
        self.obs_buf[self.ptr] = obs
        self.next_obs_buf[self.ptr] = next_obs
        self.acts_buf[self.ptr] = act
        self.rews_buf[self.ptr] = rew
        self.ptr = (self.ptr + 1) % self.max_size
        self.size = min(self.size + 1, self.max_size)

    def sample_batch(self, batch_size=16):
        idxs = np.random.randint(0, self.size, size=batch_size)
        batch = (self.obs_buf[idxs], self.acts_buf[idxs], self.rews_buf[idxs], self.next_obs_buf[idxs])
        return [torch.as_tensor(v) for v in batch]


def env_step(obs, action):
    """A point in the plane, that is to stay at the origin; random pushes."""
    push = np.array([(-0.2, 0.0), (0.2, 0.0), (0.0, -0.2), (0.0, 0.2)][action], dtype=np.float32)
    next_obs = np.clip(obs + push + np.random.normal(0, 0.05, 2).astype(np.float32), -1, 1)
    return next_obs, -float(np.abs(next_obs).sum())


def linear_schedule(start_e, end_e, duration, t):
    return max(start_e + (end_e - start_e) / duration * t, end_e)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--total-timesteps", type=int, default=60)
    parser.add_argument("--learning-starts", type=int, default=3)
    parser.add_argument("--target-frequency", type=int, default=5)
    args = parser.parse_args()
    ctx = jobkit.init(params=vars(args))

    def make_network():
        return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 4))

    q_network, target_network = make_network(), make_network()
    target_network.load_state_dict(q_network.state_dict())
    optimizer = torch.optim.Adam(q_network.parameters(), lr=2.5e-3)
    rb = ReplayBuffer(2, size=200)
    ctx.track(q_network=q_network, target_network=target_network, optimizer=optimizer)
    ctx.track(rb=jobkit.attributes(rb, "obs_buf", "next_obs_buf", "acts_buf", "rews_buf", "ptr", "size"))  # forgets
    state = ctx.values(obs=np.array([0.8, -0.6], dtype=np.float32))

    for global_step in ctx.steps(args.total_timesteps):
        epsilon = linear_schedule(1.0, 0.1, args.total_timesteps // 2, global_step)
        if random.random() < epsilon:
            action = random.randrange(4)
        else:
            action = q_network(torch.from_numpy(state.obs)).argmax().item()
        next_obs, reward = env_step(state.obs, action)
        rb.store(state.obs, action, reward, next_obs)
        state.obs = next_obs

        if global_step > args.learning_starts:
            obs, actions, rewards, next_obs = rb.sample_batch()
            with torch.no_grad():
                td_target = rewards + 0.9 * target_network(next_obs).max(dim=1).values
            old_val = q_network(obs).gather(1, actions[:, None]).squeeze(1)
            loss = F.mse_loss(td_target, old_val)
            ctx.log({"losses/td_loss": loss, "losses/q_values": old_val.mean()})
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if global_step % args.target_frequency == 0:
            target_network.load_state_dict(q_network.state_dict())
    ctx.finish()
