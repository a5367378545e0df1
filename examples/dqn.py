"""Deep Q-learning: a network learns to balance a pole on a cart.

python examples/dqn.py
"""

import numpy as np

import treadle as td
from treadle import losses, nn, optim

MOST_STEPS = 200  # of an episode: a return of 200 is the best there is
GAMMA, BATCH, MEMORY = 0.99, 64, 20_000


class CartPole:
    """Barto, Sutton and Anderson's cart: push left or right so that the pole does not fall."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def reset(self):
        self.state, self.count = self.rng.uniform(-0.05, 0.05, 4), 0
        return self.state.astype(np.float32)

    def step(self, action):
        """State, reward, whether it fell, whether the episode is over."""
        _, v, angle, spin = self.state
        force = 10.0 if action else -10.0
        pull = (force + 0.05 * spin**2 * np.sin(angle)) / 1.1
        turn = (9.8 * np.sin(angle) - np.cos(angle) * pull) / (
            0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1)
        )
        push = pull - 0.05 * turn * np.cos(angle) / 1.1
        self.state = self.state + 0.02 * np.array([v, push, spin, turn])
        self.count += 1
        fell = abs(self.state[0]) > 2.4 or abs(self.state[2]) > 12 * np.pi / 180
        return self.state.astype(np.float32), 1.0, fell, fell or self.count == MOST_STEPS


class Q(nn.Module):
    """What each action is worth."""

    def __init__(self, hidden: int = 64):
        self.fc1, self.fc2, self.out = (
            nn.Linear(4, hidden),
            nn.Linear(hidden, hidden),
            nn.Linear(hidden, 2),
        )

    def forward(self, state):
        return self.out(td.relu(self.fc2(td.relu(self.fc1(state)))))


def loss(models, batch):
    """Double Q-learning: one network chooses the next action, the other says what it is worth."""
    best = models["online"](batch["next"]).argmax(-1)
    worth = td.take_along_axis(models["target"](batch["next"]), best[:, None], 1)[:, 0]
    wanted = td.stop_gradient(batch["reward"] + GAMMA * (1 - batch["fell"]) * worth)
    chosen = td.take_along_axis(models["online"](batch["state"]), batch["action"][:, None], 1)
    return losses.huber(chosen[:, 0], wanted)


class Memory:
    """The last transitions, as arrays."""

    def __init__(self, rng):
        self.rng, self.count = rng, 0
        self.arrays = {
            "state": np.zeros((MEMORY, 4), np.float32), "action": np.zeros(MEMORY, np.int32),
            "reward": np.zeros(MEMORY, np.float32), "fell": np.zeros(MEMORY, np.float32),
            "next": np.zeros((MEMORY, 4), np.float32),
        }  # fmt: skip

    def add(self, **transition):
        for name, value in transition.items():
            self.arrays[name][self.count % MEMORY] = value
        self.count += 1

    def batch(self):
        rows = self.rng.integers(0, min(max(self.count, 1), MEMORY), BATCH)
        return {name: array[rows] for name, array in self.arrays.items()}


def follow(step):
    """The target network becomes a copy of the one that learns."""
    copies = {n.replace("online", "target"): v for n, v in step.params.items() if "online" in n}
    step.load_params(copies, strict=False)


def mean_return(act, episodes: int, seed: int):
    cart, total = CartPole(seed), 0.0
    for _ in range(episodes):
        state, is_over = cart.reset(), False
        while not is_over:
            state, reward, _, is_over = cart.step(act(state[None]).argmax())
            total += reward
    return total / episodes


def train(steps: int = 20_000, lr: float = 5e-4, seed: int = 0, episodes: int = 100):
    models = {"online": Q(), "target": Q()}
    models["target"].requires_grad_(False)
    rng = np.random.default_rng(seed)
    memory, cart = Memory(rng), CartPole(seed)
    rate = optim.cosine(lr, steps=steps)
    learn = td.compile_step(
        models, loss, optim.adam(rate), memory.batch(), device="cpu", clip_norm=10.0, seed=seed
    )
    act = learn.attach(lambda models, state: models["online"](state), td.Spec((1, 4)))
    follow(learn)
    state, best, kept = cart.reset(), 0.0, learn.params
    for made in range(1, steps + 1):
        explore = max(0.05, 1 - made / (0.2 * steps))
        action = rng.integers(2) if rng.random() < explore else int(act(state[None]).argmax())
        after, reward, fell, is_over = cart.step(action)
        memory.add(state=state, action=action, reward=reward, fell=fell, next=after)
        state = cart.reset() if is_over else after
        if made >= 500:
            learn(memory.batch())
        if made % 250 == 0:
            follow(learn)
        if made % 1000 == 0:
            score = mean_return(act, 20, seed + 1)
            print(f"step {made}: mean return of 20 episodes {score:.0f}")
            if score > best:
                best, kept = score, learn.params
            if score == MOST_STEPS:
                break
    learn.load_params(kept)
    final = mean_return(act, episodes, seed + 2)
    print(f"mean return of {episodes} episodes: {final:.1f} of {MOST_STEPS}")
    return final


if __name__ == "__main__":
    train()
