"""Agents of the tests, as a user would write them."""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import Any


def _asked(base_url: str, token: str, messages: list[dict[str, Any]], **more: Any) -> str:
    """The policy's answer, without a package of a client."""
    body = json.dumps({"model": "policy", "messages": messages, **more}).encode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def openai_client(*, base_url: str, token: str, row: dict[str, Any]) -> float:
    """Two turns and a streamed third, by OpenAI's client; the reward is how many of its answers are `right`."""
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key=token, max_retries=0)
    messages: Any = [{"role": "system", "content": "be brief"}, _user(row["prompt"])]
    answers = []
    for follows in ("again", "once more"):
        choice = client.chat.completions.create(model="policy", messages=messages).choices[0]
        answers.append(f"{choice.message.content} {choice.finish_reason}")
        messages += [choice.message.model_dump(), _user(follows)]
    chunks = list(client.chat.completions.create(model="policy", messages=messages, stream=True))
    answers.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    answers[-1] += f" {chunks[-1].choices[0].finish_reason}"
    return answers.count("right stop") + 10.0 * answers.count("right length")


async def asynchronous(*, base_url: str, token: str, row: dict[str, Any]) -> dict[str, float]:
    """One call by OpenAI's asynchronous client, and numbers beside the reward."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=base_url, api_key=token, max_retries=0)
    found = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": row["prompt"]}])
    return {"reward": 0.5, "letters": len(found.choices[0].message.content or "")}


def rewrites(*, base_url: str, token: str, row: dict[str, Any]) -> float:
    """A conversation, a second one that begins anew, the first one again, and one whose past was rewritten."""
    first = [_user("one")]
    first += [{"role": "assistant", "content": _asked(base_url, token, first)}, _user("two")]
    second = [_user("other")]
    second += [{"role": "assistant", "content": _asked(base_url, token, second)}]
    first += [{"role": "assistant", "content": _asked(base_url, token, first)}, _user("three")]
    _asked(base_url, token, first)
    _asked(base_url, token, [_user("one"), {"role": "assistant", "content": "what it never said"}, _user("two")])
    _asked(base_url, token, [*second, {"role": "tool", "content": "a result"}])
    return 1.0


def tells(*, base_url: str, token: str, row: dict[str, Any]) -> float:
    """Its address and token, as its first message."""
    _asked(base_url, token, [_user(f"{base_url} {token}")])
    return 0.0


def refused(*, base_url: str, token: str, row: dict[str, Any], requests: list[dict[str, Any]]) -> float:
    """Requests that are refused; its next one says how, a line for each."""
    said = []
    for request in requests:
        try:
            _asked(base_url, token, **{"messages": [_user("one")], **request})
            said.append("answered")
        except urllib.error.HTTPError as error:
            said.append(f"{error.code} {json.load(error)['error']['message']}")
    _asked(base_url, token, [_user("\n".join(said))])
    return 0.0


def two_at_once(*, base_url: str, token: str, row: dict[str, Any]) -> float:
    """Two calls that wait for their answers at the same time."""
    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda text=text: answers.append(_asked(base_url, token, [_user(text)])))
        for text in ("left", "right")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return float(len(answers))


def hangs(*, base_url: str, token: str, row: dict[str, Any]) -> float:
    """Never comes back from its work."""
    _asked(base_url, token, [_user("one")])
    time.sleep(3600)
    return 0.0


def raises(*, base_url: str, token: str, row: dict[str, Any]) -> float:
    """Its work fails."""
    _asked(base_url, token, [_user("one")])
    raise KeyError("no such page")


def leaves(*, base_url: str, token: str, row: dict[str, Any]) -> float:
    """Ends as a program does."""
    _asked(base_url, token, [_user("one")])
    sys.exit("enough")


def silent(*, base_url: str, token: str, row: dict[str, Any]) -> float:
    """Calls nobody."""
    return 1.0


def returns(*, base_url: str, token: str, row: dict[str, Any], value: Any) -> Any:
    """Return the value of its arguments."""
    _asked(base_url, token, [_user("one")])
    return value


def reads(*, base_url: str, token: str, row: dict[str, Any]) -> float:
    """Read YAML out of an answer, by the parser in C."""
    import yaml

    answer = _asked(base_url, token, [_user("one")])
    try:
        yaml.load(answer, yaml.CSafeLoader)
    except yaml.YAMLError:
        return 0.0
    return 1.0


def other_parameters(url: str) -> float:
    """Cannot be called as an agent is."""
    return 0.0


class Kind:
    """No function."""
