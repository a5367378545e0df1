"""A loop without a Trainer: everything it does can be done by hand.

python examples/plain_loop.py
"""

import tempfile
from pathlib import Path

import treadle as td
from treadle import data, losses, nn, optim


def loss(model, batch):
    scores = model(batch["x"])
    is_right = (scores.argmax(-1) == batch["y"]).astype(td.float32)
    td.metric("accuracy", is_right.mean(), is_right.shape[0])
    return losses.cross_entropy(scores, batch["y"])


def evaluate(step, batches):
    """Loss and accuracy over all rows: means of batches, by their weights."""
    found = [step.evaluate(batch) for batch in batches]
    rows = sum(r.weight for r in found)
    mean_loss = sum(r.loss * r.weight for r in found) / rows
    right = sum(r.metrics["accuracy"] * r.weights["accuracy"] for r in found)
    return mean_loss, right / rows


def train(epochs: int = 15, lr: float = 3e-3, folder: str = ""):
    images, labels = data.load_digits()
    arrays = {"x": images.reshape(-1, 64), "y": labels}
    rows, held_out = data.split(arrays, (0.8, 0.2), stratify=labels)
    batches = data.ArrayLoader(rows, 64, shuffle=True)
    test = data.ArrayLoader(held_out, 100)

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    step = td.compile_step(
        model, loss, optim.adamw(lr), next(iter(batches)), device="cpu", clip_norm=1.0
    )
    place = folder or tempfile.mkdtemp()
    with td.CheckpointManager(place, metric="accuracy", mode="max") as checkpoints:
        for epoch in range(epochs):
            for batch in batches:
                out = step(batch)
            test_loss, accuracy = evaluate(step, test)
            print(
                f"epoch {epoch + 1}: loss {out.loss:.3f}, held out {test_loss:.3f}, {accuracy:.1%}"
            )
            position = {"epoch": epoch + 1, "loader": batches.state_dict()}
            checkpoints.save(step, metrics={"accuracy": accuracy}, extra=position)
        best = checkpoints.restore(step, "best")
    print(f"best: {best.metrics['accuracy']:.1%}, after epoch {best.extra['epoch']}")

    predict = step.attach(lambda model, x: td.softmax(model(x)), td.Spec((1, 64)))
    chance = predict(held_out["x"][:1])
    print(f"a {held_out['y'][0]} is read as a {chance.argmax()}, to {chance.max():.0%}")
    print(f"checkpoints: {sorted(p.name for p in Path(place).glob('0*'))}")
    return best.metrics["accuracy"]


if __name__ == "__main__":
    train()
