"""A convolutional network that reads handwritten digits.

python examples/digits_cnn.py
treadle train examples/digits_cnn.py --set epochs=5 --set lr=1e-3
"""

import treadle as td
from treadle import callbacks, data, losses, metrics, nn, optim


class Net(nn.Module):
    def __init__(self, width: int = 32):
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.fc = nn.Linear(2 * width * 4, 10)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        x = td.max_pool(td.relu(self.conv1(x)), 2)  # (N, W, 4, 4)
        x = td.max_pool(td.relu(self.conv2(x)), 2)  # (N, 2W, 2, 2)
        return self.fc(self.dropout(x.flatten(1)))


group = metrics.Group({"accuracy": metrics.Accuracy(), "f1": metrics.F1()})


def loss(model, batch):
    scores = model(batch["x"])
    group.capture(scores, batch["y"])  # computed in validations, free in training
    return losses.cross_entropy(scores, batch["y"])


def train(epochs: int = 20, lr: float = 3e-3, width: int = 32, batch: int = 32, seed: int = 0):
    images, labels = data.load_digits()  # (1797, 8, 8), 0 to 1
    arrays = {"x": images[:, None], "y": labels}
    rows, held_out = data.split(arrays, (0.8, 0.2), seed=seed, stratify=labels)
    batches = data.ArrayLoader(rows, batch, shuffle=True, seed=seed)
    test = data.ArrayLoader(held_out, 360)

    schedule = optim.warmup_cosine(lr, warmup=20, steps=epochs * len(batches))
    step = td.compile_step(
        Net(width), loss, optim.adamw(schedule), next(iter(batches)), device="cpu", seed=seed
    )
    stop = callbacks.EarlyStopping("val/f1", "max", patience=8, restore_best=True)
    trainer = td.Trainer(step, [stop], metrics=group)
    history = trainer.fit(batches, epochs=epochs, validation=test)

    accuracy = trainer.evaluate(test)["accuracy"]
    print(f"{accuracy:.1%} of {len(held_out['y'])} digits are read right")
    wrong = trainer.predict(test).argmax(-1) != held_out["y"]
    print(f"not read right: {held_out['y'][wrong].tolist()}")
    return history, accuracy


if __name__ == "__main__":
    train()
