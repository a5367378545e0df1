"""Which network reads digits best: a grid search, cross-validation and a stack, by scikit-learn.

python examples/grid_search.py
treadle train examples/grid_search.py --set epochs=50 --set folds=5

`td.interop.sklearn` makes an estimator of a network: seeds, rates and weights are values of one
compiled program, so that a search compiles once for each shape of the network.
"""

from sklearn.ensemble import StackingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import treadle as td
from treadle import data


def train(epochs: int = 15, folds: int = 3, rows: int = 1400, seed: int = 0):
    images, digits = data.load_digits()
    x, x_test, y, y_test = train_test_split(
        images.reshape(len(images), -1), digits, train_size=rows, random_state=seed
    )

    net = td.interop.sklearn.Classifier(epochs=epochs, random_state=seed)
    grid = {"hidden": [(32,), (64, 32)], "lr": [3e-4, 3e-3, 1e-2], "dropout": [0.0]}
    search = GridSearchCV(net, grid, cv=folds).fit(x, y)
    for settings, score in zip(
        search.cv_results_["params"], search.cv_results_["mean_test_score"], strict=True
    ):
        print(f"{score:.1%} with hidden={settings['hidden']}, lr={settings['lr']}")
    print(f"chosen: {search.best_params_}; held out: {search.score(x_test, y_test):.1%}")

    stack = StackingClassifier(
        [
            ("net", search.best_estimator_),
            ("neighbours", make_pipeline(StandardScaler(), KNeighborsClassifier())),
        ],
        LogisticRegression(max_iter=1000),
        cv=folds,
    ).fit(x, y)
    accuracy = stack.score(x_test, y_test)
    print(f"with neighbours in a stack: {accuracy:.1%} of {len(y_test)} digits are read right")
    return accuracy


if __name__ == "__main__":
    train()
