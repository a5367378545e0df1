"""Two networks against each other: one draws digits, the other tells drawn ones from real ones.

    python examples/gan.py          # writes gan.png

Two steps act on one set of parameters (`share`), each trains its own part (`optim.only`), and one
trainer calls both. What they draw is different, though both count the same steps.
"""

from vae import save_png, sheet

import treadle as td
from treadle import data, losses, nn, optim

NOISE, BATCH = 16, 64


def generator(hidden: int = 128) -> nn.Module:
    return nn.Sequential(
        nn.Linear(NOISE, hidden), nn.BatchNorm1d(hidden), nn.ReLU(),
        nn.Linear(hidden, hidden), nn.BatchNorm1d(hidden), nn.ReLU(),
        nn.Linear(hidden, 64), nn.Sigmoid(),
    )  # fmt: skip


class Critic(nn.Module):
    def __init__(self, hidden: int = 128):
        self.fc1, self.fc2, self.out = (
            nn.Linear(64, hidden),
            nn.Linear(hidden, 64),
            nn.Linear(64, 1),
        )
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        x = self.dropout(td.leaky_relu(self.fc1(x), 0.2))
        return self.out(self.dropout(td.leaky_relu(self.fc2(x), 0.2)))


def critic_loss(models, real):
    """Real ones are to score high, drawn ones low. A little doubt (0.9) keeps it from certainty."""
    drawn = td.stop_gradient(models["g"](td.random.normal((BATCH, NOISE))))
    on_real, on_drawn = models["d"](real), models["d"](drawn)
    td.metric("told apart", ((on_real > 0).astype(td.float32) + (on_drawn < 0)).mean() / 2)
    right = losses.bce_with_logits(on_real, td.full(on_real.shape, 0.9))
    return right + losses.bce_with_logits(on_drawn, td.zeros_like(on_drawn))


def generator_loss(models, batch):
    """Drawn ones are to be taken for real. There is no data to look at."""
    scores = models["d"](models["g"](td.random.normal((BATCH, NOISE))))
    return losses.bce_with_logits(scores, td.ones_like(scores))


def train(steps: int = 6000, lr: float = 1e-3, out: str = "gan.png", seed: int = 0):
    images, _ = data.load_digits()
    batches = data.ArrayLoader(images.reshape(-1, 64), BATCH, shuffle=True, seed=seed)
    models = {"g": generator(), "d": Critic()}
    adam = optim.adam(lr, betas=(0.5, 0.999))
    spec = td.Spec((BATCH, 64))
    d_step = td.compile_step(
        models, critic_loss, optim.only(models["d"], adam), spec, device="cpu", seed=seed
    )
    g_step = td.compile_step(
        models, generator_loss, optim.only(models["g"], adam), {}, device="cpu", share=d_step
    )

    def both(steps, real):
        return {"critic": steps["d"](real), "generator": steps["g"]({})}

    trainer = td.Trainer({"d": d_step, "g": g_step}, training_step=both)
    trainer.fit(batches, steps=steps)

    draw = g_step.attach(lambda models, batch: models["g"](td.random.normal((60, NOISE))), {})
    drawn = draw({})
    save_png(out, sheet(drawn.reshape(-1, 8, 8), columns=20))
    print(f"{out}: digits that no one wrote")
    return drawn


if __name__ == "__main__":
    train()
