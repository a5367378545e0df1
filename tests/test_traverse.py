"""The shared traversal: what it visits, in which order, and what it leaves as it was."""

from __future__ import annotations

from treadle.base import dtypes
from treadle.kernel.index import Index, Var, constant, data, variable
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Convert,
    For,
    Guarded,
    Let,
    LibraryCall,
    Literal,
    Load,
    Local,
    Matmul,
    Matrix,
    Position,
    Role,
    Set,
    Statement,
    Store,
    StridedAxis,
    Update,
    View,
    Within,
)
from treadle.kernel.traverse import (
    indices_of,
    loop_names,
    map_statements,
    map_value,
    peel,
    replace_value,
    rewritten,
    substituted,
    subvalues,
    tally,
    values_of,
    walk,
    with_buffers,
    with_locals,
)

F32 = dtypes.float32
H, J, K = Var("h", 2), Var("j", 3), Var("k", 5)
ONE = Literal(1.0, F32)
A, B = Load("a", variable(H), F32), Load("b", variable(J), F32)
SUM = Apply("add", (A, Convert(B, F32)), F32)
HELD = Guarded(Within(variable(J), 0, 2), SUM, Position(variable(K), F32), F32)


def loop(var: Var, *body: Statement, role: Role = Role.SEQUENTIAL) -> For:
    return For(var, role, body)


def matrix(name: str, index: Index) -> Matrix:
    return Matrix(name, index, StridedAxis(2), StridedAxis(2))


def of_every_kind() -> tuple[Statement, ...]:
    """Every statement and every value, each with an index of its own."""
    at = [variable(K) + n for n in range(12)]
    guard = Within(at[0], 0, 9)
    value = Guarded(Within(at[1], 0, 9), Load("a", at[2], F32), Position(at[3], F32), F32)
    matrices = [matrix(name, at[n]) for n, name in ((4, "c"), (5, "a"), (6, "b"))]
    library = LibraryCall(
        "attention", (View("c", 0, (2,), (1,)),), (View("a", 0, (2,), (1,)),), (), 8
    )
    inner: tuple[Statement, ...] = (
        Let("x", value),
        Set("x", Apply("neg", (Local("x", F32),), F32)),
        Accumulate("x", "add", Convert(Load("b", at[7], F32), F32)),
        Store("c", at[8], Local("x", F32), guard),
        Update("c", at[9] + data("x", 4), ONE),
        Matmul(*matrices, True, "d"),
        library,
    )
    return (For(K, Role.SEQUENTIAL, inner, at[10]),)


def test_walk_gives_loops_before_what_they_contain() -> None:
    first, second, last = Let("x", ONE), Let("y", ONE), Let("z", ONE)
    inner = loop(J, second)
    outer = loop(H, first, inner)
    assert list(walk([outer, last])) == [outer, first, inner, second, last]
    assert loop_names([outer]) == {"h", "j"}


def test_subvalues_come_in_order() -> None:
    within, position = HELD.guard, HELD.other
    assert list(subvalues(HELD)) == [HELD, within, SUM, A, Convert(B, F32), B, position]
    guard = Within(variable(H), 0, 1)
    assert values_of(Store("c", Index(), SUM, guard)) == (SUM, guard)
    assert values_of(loop(H, Let("x", ONE))) == ()


def test_peel_takes_off_loops_of_its_roles_alone() -> None:
    inner = loop(K, Let("x", ONE))
    body = (loop(H, loop(J, inner, role=Role.PARALLEL), role=Role.PARALLEL),)
    loops, rest = peel(body, Role.PARALLEL)
    assert ([x.var for x in loops], rest) == ([H, J], (inner,))
    assert [x.var for x in peel(body, Role.PARALLEL, most=1)[0]] == [H]
    assert [x.var for x in peel(body, Role.PARALLEL, Role.SEQUENTIAL)[0]] == [H, J, K]
    assert peel(body, Role.SEQUENTIAL) == ([], body)


def test_peel_leaves_loops_that_end_early_or_have_neighbours() -> None:
    short = For(H, Role.PARALLEL, (Let("x", ONE),), constant(1))
    assert peel((short,), Role.PARALLEL) == ([], (short,))
    pair = (loop(H), loop(J))
    assert peel(pair, Role.SEQUENTIAL) == ([], pair)


def test_tally_multiplies_by_loops_or_as_it_is_told() -> None:
    body = (Let("x", ONE), loop(H, Let("y", ONE), loop(J, Let("z", ONE))))
    assert tally(body, lambda s: 1) == 1 + 2 * (1 + 3)
    assert tally(body, lambda s: 1, lambda inner, count: count) == 3


def test_values_that_do_not_change_stay_the_same_objects() -> None:
    assert map_value(HELD, lambda v: v) is HELD
    assert replace_value(HELD, lambda v: None) is HELD
    (kept,) = with_buffers([Let("x", HELD)], lambda name: name)
    assert isinstance(kept, Let)
    assert kept.value is HELD


def test_map_value_changes_what_is_inside_first() -> None:
    seen: list[object] = []
    map_value(SUM, lambda v: seen.append(v) or v)  # type: ignore[func-returns-value]
    assert seen == [A, B, Convert(B, F32), SUM]


def test_replace_value_does_not_enter_what_it_replaced() -> None:
    seen: list[object] = []

    def choose(value: object) -> Local | None:
        seen.append(value)
        return Local("x", F32) if isinstance(value, Convert) else None

    assert replace_value(SUM, choose) == Apply("add", (A, Local("x", F32)), F32)
    assert B not in seen


def test_map_statements_changes_loops_after_their_bodies() -> None:
    def change(s: Statement) -> list[Statement]:
        if isinstance(s, For):
            return [s] if s.body else []
        return [] if isinstance(s, Let) else [s, s]

    set_ = Set("x", ONE)
    body = (loop(H, loop(J, Let("x", ONE)), set_), loop(K, Let("y", ONE)))
    assert map_statements(body, change) == (loop(H, set_, set_),)


def test_rewrite_reaches_every_index_and_name() -> None:
    body = of_every_kind()
    assert sorted(i.offset for i in indices_of(body)) == list(range(11))
    seen: set[tuple[str, int]] = set()

    def index(buffer: str, at: Index) -> Index:
        seen.add((buffer, at.offset))
        return at + 100

    moved = rewritten(body, index, str.upper)
    assert sorted(i.offset for i in indices_of(moved)) == list(range(100, 111))
    accessed = {("a", 2), ("a", 5), ("b", 6), ("b", 7), ("c", 4), ("c", 8), ("c", 9)}
    assert seen == accessed | {("", n) for n in (0, 1, 3, 10)}
    text = repr(moved)
    assert not any(f"buffer='{name}'" in text for name in "abcd")
    assert "bias='D'" in text


def test_locals_are_renamed_inside_indices_too() -> None:
    text = repr(with_locals(of_every_kind(), {"x": "fresh"}))
    assert "'x'" not in text
    assert text.count("'fresh'") == repr(of_every_kind()).count("'x'")


def test_substituted_replaces_variables() -> None:
    (store,) = substituted([Store("c", variable(H) * 3 + variable(J), A)], {H: constant(1)})
    assert store == Store("c", variable(J) + 3, Load("a", constant(1), F32))
