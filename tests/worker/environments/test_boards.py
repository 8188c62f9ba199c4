"""FrozenLake, Sokoban and how answers become actions, without a process."""

from __future__ import annotations

import json
from collections import Counter, deque
from random import Random
from typing import Any

import gymnasium
import pytest

from rljob_api.environments import Form
from rljob_worker.environments.answers import Actions
from rljob_worker.environments.frozen_lake import FrozenLake, LakeSettings, draw_map
from rljob_worker.environments.load import Source, maker
from rljob_worker.environments.sokoban import Room, SokobanSettings, draw_room
from rljob_worker.errors import UserError

MOVES = ("Left", "Down", "Right", "Up")


def lake(**args: Any) -> FrozenLake:
    return FrozenLake(LakeSettings.model_validate({"instructions": False} | args))


def test_a_lake_is_that_of_gymnasium_move_by_move() -> None:
    ended = Counter[bool]()
    for seed in range(60):
        size = 2 + seed % 4
        ours = lake(size=size, holes=0.3)
        text = ours.reset(seed=seed, options={})[0]
        rows = text.replace(" ", "").replace("P", "S").replace("_", "F").replace("O", "H").splitlines()
        theirs = gymnasium.make("FrozenLake-v1", desc=rows, is_slippery=False, disable_env_checker=True).unwrapped
        theirs.reset(seed=seed)
        rng = Random(seed)
        for _ in range(30):
            action = int(rng.random() * 4)
            text, reward, terminated, truncated, info = ours.step(MOVES[action])
            place, their_reward, their_end, _, _ = theirs.step(action)
            assert next(i for i, cell in enumerate(text.split()) if cell in "PXV") == place
            assert (reward, terminated, truncated, info["valid"]) == (their_reward, their_end, False, 1.0)
            if terminated:
                assert info["success"] == reward
                ended[bool(reward)] += 1
                break
    assert min(ended[True], ended[False]) > 5


def test_a_lake_follows_from_its_seed_and_has_a_way() -> None:
    first = [lake(size=5).reset(seed=seed, options={})[0] for seed in range(50)]
    used = lake(size=5)
    assert [used.reset(seed=seed, options={})[0] for seed in range(50)] == first
    assert len(set(first)) > 45
    with pytest.raises(ValueError, match="no map of 2 x 2 with holes 1 had a way to the goal"):
        draw_map(Random(0), 2, 1.0)


def test_ice_that_is_slippery_leads_to_either_side_as_often_as_ahead() -> None:
    environment, places = lake(size=3, holes=0, slippery=True), Counter[str]()
    for seed in range(600):
        environment.reset(seed=seed, options={})
        places[environment.step("Right")[0]] += 1
    assert len(places) == 3
    assert min(places.values()) > 150, "a third of 600 each"


def test_the_near_view_shows_what_is_beside_one() -> None:
    environment = lake(size=2, holes=0, view="Near")
    assert environment.reset(seed=0, options={})[0] == "r0 c0 # _ _ #"
    assert environment.step("Down")[0] == "r1 c0 # # G _"


ALL = ("Left", "Down", "Right", "Up")


@pytest.mark.parametrize(
    ("form", "answer", "action"),
    [
        (Form.PLAIN, "Right", "Right"),
        (Form.PLAIN, " I go left, no: UP.\n", "Up"),
        (Form.PLAIN, "Leftover", None),
        (Form.PLAIN, "", None),
        (Form.ANSWER, "<answer>Left</answer> or <answer> Down\n</answer>", "Down"),
        (Form.ANSWER, "Left", None),
        (Form.ANSWER, "<answer>Left</answer> or <answer>Home</answer>", None),
        (Form.ANSWER, "<answer>Left", None),
        (Form.THINK, "<think>a\nhole</think>\n<answer>Left</answer>", "Left"),
        (Form.THINK, "<think></think><answer>left</answer>\n", "Left"),
        (Form.THINK, "<answer>Left</answer>", None),
        (Form.THINK, "<think>x</think> so <answer>Left</answer>", None),
        (Form.THINK, "<think>x</think> <answer>Left</answer> done", None),
        (Form.THINK, "<think>x</think></think> <answer>Left</answer>", None),
    ],
)
def test_an_answer_is_an_action_in_its_form_alone(form: Form, answer: str, action: str | None) -> None:
    number = Actions(ALL, form).number(answer)
    assert (None if number is None else ALL[number]) == action


@pytest.mark.parametrize("form", Form)
def test_what_is_told_of_a_form_is_taken(form: Form) -> None:
    actions = Actions(ALL, form)
    assert [actions.number(actions.written(number)) for number in range(4)] == [0, 1, 2, 3]
    assert all(name in actions.told() for name in ALL)
    if form is not Form.PLAIN:
        told = actions.told().partition("form: ")[2]
        assert actions.number(told) == 3


def test_an_answer_of_a_megabyte_is_read_at_once() -> None:
    """A pattern that takes the square of its length would take hours; the test's own deadline sees it."""
    for form in Form:
        for part in ("<think>", "</think> ", "<answer>", " Left ", "<think></think>"):
            Actions(ALL, form).number("<think>" + part * 100_000)
        Actions(ALL, form).number("<think></think><answer>" + " " * 1_000_000)


def test_an_answer_that_is_no_action_costs_and_is_told() -> None:
    environment = FrozenLake(LakeSettings(formatPenalty=-0.5, form=Form.ANSWER))  # type: ignore[call-arg]
    begun = environment.reset(seed=1, options={})[0]
    board = begun.rpartition("\n\n")[2]
    text, reward, ended, _, info = environment.step("Right")
    assert text.startswith("That was no action. ")
    assert text.endswith(f"\n\n{board}")
    assert (reward, ended, info) == (-0.5, False, {"valid": 0.0, "success": 0.0})
    bare = lake()
    board = bare.reset(seed=1, options={})[0]
    assert bare.step("hello")[0] == board


# --- Sokoban ---------------------------------------------------------------------------------------


def solution(room: Room, settings: SokobanSettings) -> list[int] | None:
    """The shortest list of moves, by breadth-first search."""
    begin = (room.player, frozenset(room.boxes))
    seen, queue = {begin}, deque([(begin, list[int]())])
    while queue:
        (player, boxes), moves = queue.popleft()
        for action in range(4):
            after = Room(room.floor, room.targets, set(boxes), player, settings)
            after.move(action)
            state = after.player, frozenset(after.boxes)
            if after.done:
                return [*moves, action]
            if state not in seen:
                seen.add(state)
                queue.append((state, [*moves, action]))
    return None


@pytest.mark.parametrize(("size", "boxes", "seeds"), [((5, 5), 1, 40), ((6, 6), 2, 6)])
def test_a_board_can_be_solved_and_is_not_yet(size: tuple[int, int], boxes: int, seeds: int) -> None:
    settings = SokobanSettings(size=size, boxes=boxes)
    boards = set()
    for seed in range(seeds):
        room = draw_room(Random(seed), settings)
        assert room.boxes != room.targets
        assert len(room.boxes) == len(room.targets) == boxes
        assert room.boxes | room.targets | {room.player} <= room.floor
        assert room.player not in room.boxes
        moves = solution(room, settings)
        assert moves
        boards.add(room.text())
        rewards = [room.move(action) for action in moves]
        assert room.done
        assert room.success
        assert rewards[-1] == pytest.approx(-0.1 + 1 + 10)
    assert len(boards) > 0.6 * seeds


def test_boxes_are_pushed_and_never_pulled() -> None:
    settings = SokobanSettings(size=(5, 6), boxes=1)
    floor = {(2, column) for column in range(1, 5)}
    room = Room(floor, {(2, 3)}, {(2, 2)}, (2, 1), settings)
    assert room.text().splitlines()[2] == "# P X O _ #"
    up, _, left, right = range(4)
    assert room.move(up) == pytest.approx(-0.1)
    assert room.text().splitlines()[2] == "# P X O _ #"
    assert room.move(right) == pytest.approx(10.9)
    assert room.text().splitlines()[2] == "# _ P √ _ #"
    assert room.move(left) == pytest.approx(9.9)
    assert room.text().splitlines()[2] == "# P _ √ _ #"
    room = Room(floor, {(2, 2)}, {(2, 2)}, (2, 1), settings)
    assert room.move(right) == pytest.approx(-1.1)
    assert room.text().splitlines()[2] == "# _ S X _ #"
    assert room.move(right) == pytest.approx(-0.1)
    assert room.move(right) == pytest.approx(-0.1), "behind the box is a wall"
    assert room.text().splitlines()[2] == "# _ O P X #"


def test_a_board_in_other_symbols() -> None:
    """The same boards, so that a policy is tested on the symbols alone."""
    other = {"wall": "W", "empty": ".", "target": "G", "boxOnTarget": "C", "box": "B", "player": "A"}
    environments = [
        maker(Source(name="Sokoban", args={"size": [6, 6], "instructions": False, "grid": grid}))()
        for grid in ({}, other | {"playerOnTarget": "@"})
    ]
    for seed in range(5):
        ours, theirs = (environment.reset(seed=seed, options={})[0] for environment in environments)
        assert ours.translate(str.maketrans("#_O√XPS", "W.GCBA@")) == theirs


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("Chess", {}, "environment.name: there is no 'Chess'; built in are FrozenLake and Sokoban"),
        ("FrozenLake", {"sise": 3}, "environment.args.sise: there is no such argument; there are form, "),
        ("FrozenLake", {"holes": 0.9}, "environment.args.holes: "),
        ("FrozenLake", {"form": "Loud"}, "environment.args.form: "),
        ("FrozenLake", {"formatPenalty": 1}, "environment.args.formatPenalty: "),
        ("Sokoban", {"size": [4, 6]}, "environment.args.size.0: "),
        ("Sokoban", {"grid": {"wall": "X"}}, "environment.args.grid: Value error, symbols must differ: X _ O √ X P S"),
        ("Sokoban", {"grid": {"wall": "a b"}}, "environment.args.grid.wall: "),
    ],
)
def test_wrong_arguments_are_named(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        maker(Source(name=name, args=args))
    assert str(refused.value).startswith(message), json.dumps(str(refused.value))


def test_more_boxes_than_there_is_room_for_are_named() -> None:
    environment = maker(Source(name="Sokoban", args={"size": [5, 5], "boxes": 8}))()
    with pytest.raises(ValueError, match="no board of 5 x 5 with 8 boxes came of 1000 draws"):
        environment.reset(seed=0, options={})
