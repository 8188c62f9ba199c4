"""Agent of agent.yaml: asks the policy for a box, opens that, and asks what lay in it."""

from typing import Any

from openai import OpenAI

# Made once in a process: a client of its own for each episode would take longer than its calls. A call waits for all
# answers of its turn, and one that its client gives up fails the episode.
CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="-", timeout=None, max_retries=0)


def play(*, base_url: str, token: str, row: dict[str, Any], forget: bool = False) -> dict[str, float]:
    """Two calls, and the reward of what came of them.

    Args:
        base_url: of the policy.
        token: of this episode.
        row: of the data: a prompt such as `box a`, the boxes, and the label, which is the digit in that box.
        forget: whether the second call begins a conversation of its own, which is then a further stream.
    """
    client = CLIENT.with_options(base_url=base_url, api_key=token)
    messages: Any = [{"role": "user", "content": row["prompt"]}]
    box = _said(client, messages)
    found = {"role": "user", "content": row["boxes"].get(box, "nothing")}
    answer = _said(client, [found] if forget else [*messages, {"role": "assistant", "content": box}, found])
    opened, success = float(row["prompt"] == f"box {box}"), float(answer == row["label"])
    return {"reward": 0.5 * opened + success, "opened": opened, "success": success}


def _said(client: OpenAI, messages: Any) -> str:
    content = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
    return content or ""


# Words that it says and the data does not, for the tokenizer that is trained on them.
play.examples = ["nothing"]  # type: ignore[attr-defined]
