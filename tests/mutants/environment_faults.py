"""Faults of environments, of what a turn appends, and of answers on their way from an engine."""

from __future__ import annotations

from mutants.fault import Fault

_WORKER = "worker/rljob_worker"
_HOSTS = "tests/worker/environments/test_environment_hosts.py"
_BOARDS = "tests/worker/environments/test_boards.py"
_DELTAS = "tests/worker/data/test_turn_deltas.py"
_EPISODES = "tests/worker/rollouts/test_episodes_of_turns.py"
_CHUNKS = "tests/worker/engine/test_response_chunks.py"

ENVIRONMENT_FAULTS = (
    Fault(
        "each response holds back those before it",
        f"{_WORKER}/engine/chunks.py",
        "due = due if chunk else time.monotonic() + seconds",
        "due = time.monotonic() + max(seconds, 5.0)",
        f"{_CHUNKS}::test_a_steady_stream_of_responses_holds_none_of_them_back",
    ),
    Fault(
        "an engine without work is waited for",
        f"{_WORKER}/engine/chunks.py",
        "lambda: finished.put(_Mark.IDLE)",
        "lambda: None",
        f"{_CHUNKS}::test_an_engine_without_work_is_waited_for_no_longer",
    ),
    Fault(
        "a request is as long as the job's longest response",
        f"{_WORKER}/engine/sampling.py",
        "most = request.limit(max_tokens)",
        "most = max_tokens",
        "tests/worker/engine/test_rollout_pure.py::test_a_request_is_as_long_as_its_own_limit",
    ),
    Fault(
        "responses have the numbers of their arrival",
        f"{_WORKER}/engine/service.py",
        "key = place if request.key is None else request.key",
        "key = place",
        "tests/worker/engine/test_request_service.py -k keys",
    ),
    Fault(
        "an environment that is made anew is another one, and nothing is said",
        f"{_WORKER}/environments/episodes.py",
        "        if answer == before:\n",
        "        if True:\n",
        f"{_HOSTS}::test_another_answer_than_before_is_a_failure",
    ),
    Fault(
        "neighbours of an environment that dies are given up",
        f"{_WORKER}/environments/hosts.py",
        "            if episode in at_work:\n",
        "            if True:\n",
        f"{_HOSTS}::test_a_host_that_dies_or_lies_is_replaced_and_its_neighbours_go_on -k lie",
    ),
    Fault(
        "an answer to another task is taken",
        f"{_WORKER}/environments/host_process.py",
        "if not self.at or task != self.at[0].task:",
        "if not self.at:",
        f"{_HOSTS}::test_a_host_that_dies_or_lies_is_replaced_and_its_neighbours_go_on -k lie",
    ),
    Fault(
        "an environment is not closed after it failed",
        f"{_WORKER}/environments/host.py",
        "                held.forget(number)\n",
        "",
        f"{_HOSTS}::test_what_an_environment_does_wrong_ends_its_episode_by_name",
    ),
    Fault(
        "a box is pulled where it would be pushed into a wall",
        f"{_WORKER}/environments/sokoban.py",
        "to in self.boxes and beyond in self.floor - self.boxes",
        "to in self.boxes",
        f"{_BOARDS} -k boxes",
    ),
    Fault(
        "an answer in the form Think may say more than its action",
        f"{_WORKER}/environments/answers.py",
        "_THINK.fullmatch(answer)",
        "_THINK.match(answer)",
        f"{_BOARDS}::test_an_answer_is_an_action_in_its_form_alone",
    ),
    Fault(
        "an answer is closed twice",
        f"{_WORKER}/data/turns.py",
        "if end is not None and tail.lstrip().startswith(end):",
        "if False:",
        f"{_DELTAS} -k whole_conversation",
    ),
    Fault(
        "an observation closes the turn in which it stands",
        f"{_WORKER}/data/turns.py",
        "        texts = [self.special.broken(one) for one in observed]\n",
        "        texts = [(one, 0) for one in observed]\n",
        f"{_DELTAS} -k special_token",
    ),
    Fault(
        "an environment that is asked over an update is asked again",
        f"{_WORKER}/rollouts/turns.py",
        "        if live is not None and self._live.waits(live):\n",
        "        if False:\n",
        f"{_EPISODES}::test_episodes_go_on_over_updates_beside_new_ones",
    ),
    Fault(
        "what an environment says to a dropped sample is given to the one in its place",
        f"{_WORKER}/rollouts/turns.py",
        "            if not live.current:\n",
        "            if False:\n",
        f"{_EPISODES}::test_what_an_environment_says_to_dropped_samples_is_not_used",
    ),
    Fault(
        "an update of the weights waits for environments",
        f"{_WORKER}/rollouts/turns.py",
        "            elif paused():\n                return\n",
        "",
        f"{_EPISODES}::test_an_update_does_not_wait_for_environments",
    ),
    Fault(
        "an environment that was lost while the policy answered is asked for the next step",
        f"{_WORKER}/rollouts/turns.py",
        "        if live.world.hosts.holds(live.key):\n",
        "        if True:\n",
        f"{_EPISODES}::test_environments_that_are_lost_while_the_policy_answers_give_their_groups_back",
    ),
    Fault(
        "an attempt that ends by an error that nobody foresaw says nothing",
        f"{_WORKER}/driver/attempt.py",
        "        except Exception as error:\n            outcome = failed(",
        "        except (ZeroDivisionError, OSError) as error:\n            outcome = failed(",
        "tests/worker/driver/test_attempt_ends.py::test_an_error_that_nobody_foresaw_is_the_outcome",
    ),
)
