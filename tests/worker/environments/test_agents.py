"""Agents: programs that call the policy by OpenAI's chat completions, in confined processes."""

from __future__ import annotations

import http.client
import json
import re
import socket
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from environment_hosts import MakeHosts

from rljob_worker.environments.agent import Agent
from rljob_worker.environments.agent_door import AgentDoor, Call
from rljob_worker.environments.base import AgentSource, Answer, Began, EnvironmentFailure, FailureKind, Stepped
from rljob_worker.environments.hosts import EnvironmentHosts
from rljob_worker.environments.load import Source
from rljob_worker.errors import UserError

CASES = Path(__file__).with_name("agent_cases.py")


def agent(name: str, *ignore: str, **args: Any) -> Source:
    return Source(agent=AgentSource(f"{CASES}:{name}", ignore, args))


def taken(hosts: EnvironmentHosts) -> dict[int, Answer]:
    """The answers that are awaited: each has a deadline."""
    found: dict[int, Answer] = {}
    while hosts.outstanding:
        found |= dict(hosts.take(1.0))
    return found


def began(hosts: EnvironmentHosts, key: int = 0, **row: Any) -> Began:
    hosts.begin(key, 0, {"prompt": "a question", **row})
    answer = taken(hosts)[key]
    assert isinstance(answer, Began), answer
    assert answer.call is not None
    return answer


def stepped(hosts: EnvironmentHosts, action: str, key: int = 0, cut: bool = False) -> Answer:
    hosts.step(key, action, cut)
    return taken(hosts)[key]


def calls(hosts: EnvironmentHosts, *actions: str) -> list[tuple[int, tuple[tuple[str, str], ...]]]:
    """Stream and messages of all calls of an episode, whose last answer is its end."""
    first = began(hosts)
    assert first.call is not None
    found = [first.call]
    for action in actions:
        answer = stepped(hosts, action)
        assert isinstance(answer, Stepped), answer
        if answer.call is not None:
            found.append(answer.call)
    assert answer.done
    return [(call.stream, call.messages) for call in found]


def test_openais_client_plays_turns_of_one_stream(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(agent("openai_client"), reset=500.0, deterministic=False)
    first = began(hosts)
    assert first.observation == "[system] be brief\na question"
    assert first.call is not None
    assert (first.call.stream, first.call.messages) == (0, (("system", "be brief"), ("user", "a question")))
    for cut, follows in ((False, "again"), (True, "once more")):
        answer = stepped(hosts, "right", cut=cut)
        assert isinstance(answer, Stepped), answer
        assert (answer.observation, answer.reward, answer.done) == (follows, 0.0, False)
        assert answer.call is not None
        assert (answer.call.stream, answer.call.messages) == (0, (("user", follows),))
    last = stepped(hosts, "right")
    assert isinstance(last, Stepped), last
    assert (last.reward, last.done, last.call) == (12.0, True, None)


def test_an_asynchronous_agent_returns_numbers_beside_its_reward(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(agent("asynchronous"), reset=500.0, deterministic=False)
    began(hosts)
    last = stepped(hosts, "four")
    assert isinstance(last, Stepped), last
    assert (last.reward, last.values) == (0.5, {"letters": 4.0})


def test_a_conversation_that_does_not_go_on_from_an_answer_opens_a_stream(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(agent("rewrites"), deterministic=False)
    assert calls(hosts, *"abcdef") == [
        (0, (("user", "one"),)),
        (1, (("user", "other"),)),
        (0, (("user", "two"),)),
        (0, (("user", "three"),)),
        (2, (("user", "one"), ("assistant", "what it never said"), ("user", "two"))),
        # What follows an answer in another role than the user's.
        (3, (("user", "other"), ("assistant", "b"), ("tool", "a result"))),
    ]


def test_calls_at_the_same_time_are_answered_one_after_the_other(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(agent("two_at_once"), deterministic=False)
    found = calls(hosts, "x", "y")
    assert sorted(messages[0][1] for _, messages in found) == ["left", "right"]
    assert [stream for stream, _ in found] == [0, 1]


def post(url: str, **headers: str) -> int:
    body = json.dumps({"messages": [{"role": "user", "content": "-"}]}).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body, headers)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_an_episode_is_answered_by_its_own_token_alone(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(agent("tells"), deterministic=False)
    (url, token), (other, others) = (began(hosts, key).observation.split() for key in (0, 1))
    assert url.startswith("http://127.0.0.1:")
    assert post(url) == 401
    assert post(url, Authorization=f"Bearer {token}x") == 401
    assert post(url, Authorization=f"Bearer {others}") == 401
    assert post(other, Authorization=f"Bearer {token}") == 401
    assert post(url.replace("/v1", "0/v1"), Authorization=f"Bearer {token}") == 401
    models = urllib.request.Request(f"{url}/models", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(models) as answer:
        assert [one["id"] for one in json.load(answer)["data"]] == ["policy"]
    hosts.end(0)
    # The host does what it is asked in turn: the end of the first one is done before this.
    stepped(hosts, "-", key=1)
    assert post(url, Authorization=f"Bearer {token}") == 401


def test_a_page_of_a_stranger_is_not_answered(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(agent("tells"), deterministic=False)
    url, token = began(hosts).observation.split()
    # A browser shows it under a name that leads here.
    assert post(url, Authorization=f"Bearer {token}", Host="evil.example:80") == 421
    assert post(url, Authorization=f"Bearer {token}", Origin="http://evil.example") == 403


def test_a_long_body_is_read_of_who_has_the_token_alone() -> None:
    door = AgentDoor()
    entrance = door.open(Call.refuse)
    address = urllib.parse.urlsplit(entrance.base_url)
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 2**17}]}).encode()
    try:
        for token, sent, status in ((f"{entrance.token}x", b"", 401), (entrance.token, body, 410)):
            connection = http.client.HTTPConnection(address.netloc, timeout=60)
            connection.putrequest("POST", f"{address.path}/chat/completions")
            connection.putheader("Authorization", f"Bearer {token}")
            connection.putheader("Content-Length", str(len(body)))
            # The stranger is answered although nothing of the body has come.
            connection.endheaders(sent)
            assert connection.getresponse().status == status
            connection.close()
    finally:
        door.close()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.2}, "temperature: .* environment.agent.ignore, which spec.rollout.temperature says"),
    ({"seed": 3}, "seed: .*environment.agent.ignore"),
    ({"presence_penalty": 0.1}, "presence_penalty: this endpoint does not take it: leave it out"),
    ({"n": 2}, "n: this endpoint does not take it: leave it out"),
    ({"tools": [{"type": "function"}]}, "tools: this endpoint does not take it"),
    ({"messages": [{"role": "user", "content": "é" * 2**19}]}, "messages: 1048592 bytes; 1048576 at most"),
    ({"stream": "false"}, "stream: 'false'; true or false is needed"),
    ({"model": ["policy"]}, r"model: \['policy'\]; a text is needed"),
    ({"messages": []}, "messages: a list of one or more"),
    ({"messages": [{"role": "assistant", "content": "-"}]}, "messages: the last one is the assistant's"),
    ({"messages": [{"role": "robot", "content": "-"}]}, r"messages\[0\].role: 'robot'; allowed: system"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"messages\[0\].content: text"),
    ({"messages": [{"role": "user", "content": "-", "tool_calls": [1]}]}, r"messages\[0\].tool_calls"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, r"messages\[0\].content: no text"),
]


def test_a_request_that_cannot_be_kept_is_refused_by_name(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(agent("refused", requests=[request for request, _ in REFUSED]), deterministic=False)
    told = began(hosts).observation.split("\n")
    assert len(told) == len(REFUSED)
    for line, (_, said) in zip(told, REFUSED):
        assert re.match(f"400 .*{said}", line), line


def test_fields_that_are_named_are_left_alone(make_hosts: MakeHosts) -> None:
    request = {"temperature": 0.2, "max_tokens": 5, "n": 1, "tools": [], "logprobs": False, "stop": None}
    request |= {"presence_penalty": 0.0, "response_format": {"type": "text"}}
    hosts = make_hosts(agent("refused", "temperature", "max_tokens", requests=[request]), deterministic=False)
    assert began(hosts).observation == "one"


def test_an_agent_that_never_answers_ends_by_its_deadline(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(agent("hangs"), step=1.0, retries=0, deterministic=False)
    began(hosts)
    failure = stepped(hosts, "x")
    assert isinstance(failure, EnvironmentFailure)
    assert failure.kind is FailureKind.INFRA
    assert "agent_cases.py:hangs, seed 0, step 1: step gave no answer within environment.stepSeconds" in failure.text
    counts = hosts.take_counts()
    assert (counts.restarts, counts.failures[FailureKind.INFRA]) == (1, 1)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (agent("raises"), r"step 1: step: KeyError: 'no such page' \(.*agent_cases.py"),
        (agent("leaves"), "step 1: step: SystemExit: enough"),
        (agent("returns", value=None), "the agent returned None: a number, its reward"),
        (agent("returns", value="good"), "the agent returned 'good'"),
        (agent("returns", value=float("nan")), "the reward is nan, which is not finite"),
        (agent("returns", value={"score": 1}), "in which there is no 'reward'"),
    ],
)
def test_an_agent_that_fails_is_a_failure_of_its_episode_alone(
    make_hosts: MakeHosts, source: Source, said: str
) -> None:
    hosts = make_hosts(source, deterministic=False)
    began(hosts)
    began(hosts, 1)
    failure = stepped(hosts, "x")
    assert isinstance(failure, EnvironmentFailure)
    assert failure.kind is FailureKind.DATA
    assert re.search(said, failure.text), failure.text
    assert hosts.take_counts().restarts == 0, "the other one goes on"


def test_an_agent_that_calls_nobody_fails_at_its_reset(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(agent("silent"), deterministic=False)
    hosts.begin(0, 0, {})
    failure = taken(hosts)[0]
    assert isinstance(failure, EnvironmentFailure)
    assert failure.text.endswith("reset: the agent returned 1.0 before it called the policy")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (agent("nobody"), "environment.agent.python: .*has no 'nobody'"),
        (agent("Kind"), "environment.agent.python: .*is not a function but type"),
        (agent("other_parameters"), r"environment.agent.python: .*is called as function\(base_url=.*which fails"),
        (agent("silent", more=1), "environment.agent.python: .*unexpected keyword argument 'more'"),
    ],
)
def test_what_is_no_agent_is_refused(make_hosts: MakeHosts, source: Source, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_hosts(source).start()


def test_an_agent_whose_episode_was_ended_is_not_answered_any_more(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(agent("hangs"), per_process=4, deterministic=False)
    for key in range(4):
        began(hosts, key)
    for key in range(3):
        hosts.end(key)
    # Its place is free again, though their threads sleep.
    assert [began(hosts, key).observation for key in (4, 5, 6)] == ["one"] * 3


def test_a_process_holds_many_agents_within_its_memory(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(agent("returns", value=1.0), per_process=150, deterministic=False)
    for key in range(150):
        hosts.begin(key, 0, {})
    answers = taken(hosts)
    assert [type(answers[key]) for key in range(150)] == [Began] * 150, answers


def test_an_agent_that_gives_a_call_up_fails() -> None:
    """Its client asks again, or something else: what the policy says to this call is read by nobody."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        # As the door's connections have it.
        ours.settimeout(60.0)
        call = Call([("user", "one")], ours)
        assert not call.given_up()
        door: Any = SimpleNamespace()
        agent = Agent(door)
        assert agent._asked(call) == "one"
        theirs.close()
        assert call.given_up()
        with pytest.raises(ValueError, match="the agent gave up a call before it was answered"):
            agent.step("an answer")


def test_an_agent_may_read_what_is_nested_deeply(make_hosts: MakeHosts) -> None:
    """A policy repeats itself; with a small stack a parser in C would end the process."""
    hosts = make_hosts(agent("reads"), deterministic=False)
    began(hosts)
    last = stepped(hosts, "[" * 5000)
    assert isinstance(last, Stepped), last
    assert (last.reward, last.done) == (0.0, True)
