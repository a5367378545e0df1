"""Blocks of scores: their matmuls in either order in memory, and the statistics of rows."""

from __future__ import annotations

import numpy as np
import pytest

from test_kernels import MEANINGS
from treadle.kernel.index import Index, Var
from treadle.kernel.interpret import interpret
from treadle.kernel.nodes import Accumulate, Buffer, For, Kernel, Role, Statement
from treadle.schedule.operands import transposed
from treadle.schedule.softmax import F32, Queries, Rows, Scores, local, log_sum, power, statistics

KEYS, COUNT, WIDTH = 5, 3, 4
SHAPES = {"keys": (KEYS, WIDTH), "queries": (COUNT, WIDTH), "copy": (WIDTH, COUNT)}
SHAPES |= {"scores": (KEYS, COUNT), "logs": (COUNT,)}
BUFFERS = {name: Buffer(name, F32, int(np.prod(shape))) for name, shape in SHAPES.items()}
OF_KEYS, OF_QUERIES = (Rows(BUFFERS[n], Index(), WIDTH) for n in ("keys", "queries"))
LOGS = Rows(BUFFERS["logs"], Index(), 1)


def scores(keys_are_rows: bool = True) -> Scores:
    stride = COUNT if keys_are_rows else KEYS
    return Scores(Rows(BUFFERS["scores"], Index(), stride), KEYS, COUNT, keys_are_rows)


def drawn(keys_are_rows: bool = True) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    found = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in SHAPES.items()}
    found["scores"] = found["scores"] if keys_are_rows else found["scores"].T.copy()
    return found


def run(memory: dict[str, np.ndarray], *body: Statement) -> dict[str, np.ndarray]:
    """What a kernel leaves in memory."""
    kernel = Kernel("blocks", (), tuple(BUFFERS.values()), body)
    flat = {n: a.flatten() for n, a in memory.items()}
    interpret(kernel, flat, MEANINGS)
    return {n: a.reshape(memory[n].shape) for n, a in flat.items()}


def test_scores_of_queries_that_are_lanes() -> None:
    given, queries = drawn(), Queries(BUFFERS["copy"], COUNT, WIDTH)
    matmul = scores().computed(OF_KEYS.matrix(KEYS, WIDTH), queries.matrix)
    found = run(given, *queries.copied(OF_QUERIES, Var("i", COUNT)), matmul)
    np.testing.assert_allclose(found["scores"], given["keys"] @ given["queries"].T, rtol=1e-5)


def test_scores_with_queries_as_rows() -> None:
    given = drawn(keys_are_rows=False)
    of_keys, of_queries = OF_KEYS.matrix(KEYS, WIDTH), OF_QUERIES.matrix(COUNT, WIDTH)
    found = run(given, scores(False).computed(of_keys, of_queries))
    np.testing.assert_allclose(found["scores"], given["queries"] @ given["keys"].T, rtol=1e-5)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("keys_are_rows", [False, True])
def test_scores_onto_keys_and_queries(keys_are_rows: bool, adds: bool) -> None:
    given, block = drawn(keys_are_rows), scores(keys_are_rows)
    by_keys = given["scores"] if keys_are_rows else given["scores"].T
    of_keys, of_queries = OF_KEYS.matrix(KEYS, WIDTH), OF_QUERIES.matrix(COUNT, WIDTH)
    onto_keys = run(given, block.onto_keys(of_keys, of_queries, adds))["keys"]
    expected = by_keys @ given["queries"] + adds * given["keys"]
    np.testing.assert_allclose(onto_keys, expected, rtol=1e-4, atol=1e-6)
    onto_queries = run(given, block.onto_queries(of_queries, of_keys, adds))["queries"]
    expected = by_keys.T @ given["keys"] + adds * given["queries"]
    np.testing.assert_allclose(onto_queries, expected, rtol=1e-4, atol=1e-6)


def test_some_keys_of_a_block() -> None:
    part = scores().part(Index() + 2, 3)
    matrix = part.by_keys
    assert (matrix.index.offset, matrix.rows.count, matrix.columns.count) == (2 * COUNT, 3, COUNT)
    assert transposed(transposed(matrix)) == matrix


@pytest.mark.parametrize("seen", [None, 2])
@pytest.mark.parametrize("row", [0.0, 1000.0, -np.inf, np.inf], ids=str)
def test_statistics_of_a_row(row: float, seen: int | None) -> None:
    """The logarithm of a sum of exponentials, of the keys that are seen, without overflow."""
    given = drawn()
    given["scores"][:, 1] += np.float32(row)
    s, i = Var("s", KEYS), Var("i", COUNT)
    score = scores().load(s, i)
    terms = [Accumulate("total", "add", power(score, local("shift")))]
    stop = None if seen is None else Index() + seen
    body = statistics(s, score, terms, ["total"], stop)
    body.append(LOGS.store(log_sum("total", "shift"), i))
    with np.errstate(all="ignore"):
        found = run(given, For(i, Role.PARALLEL, tuple(body)))["logs"]
        expected = np.logaddexp.reduce(given["scores"][:seen].astype(np.float64), axis=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
