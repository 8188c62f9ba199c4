"""`rljob samples`."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rljob_api.how_many import how_many
from rljob_api.safe_text import visible_block, visible_line
from rljob_worker.cli.manifest import folder_name
from rljob_worker.errors import UserError
from rljob_worker.report.text import number

if TYPE_CHECKING:
    from rljob_worker.records.token_files import SampleTokens

_MARGIN = f"{'|':>9} "
"""Before the second line of a text and those after it."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    command = commands.add_parser(
        "samples",
        help="read what the policy wrote",
        description="Print prompts, responses and rewards from a run's trajectory files: reading samples is how "
        "reward hacking is found.",
    )
    command.add_argument("folder", metavar="DIR", type=folder_name, help="the run folder")
    command.add_argument("--step", type=int, metavar="N", help="step to read (default: the newest written)")
    order = command.add_mutually_exclusive_group()
    order.add_argument("--worst", type=int, metavar="K", help="only the K samples with the lowest reward")
    order.add_argument("--best", type=int, metavar="K", help="only the K samples with the highest reward")
    command.add_argument(
        "--tokens",
        action="store_true",
        help="print each token with its log-probabilities too: the engine's, the trainer's, and the ratio of the "
        "probabilities (trainer to engine); of a step the first 32,768 tokens are kept",
    )
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the samples."""
    from rljob_worker.records.run_files import require_run_folder
    from rljob_worker.records.token_files import read_tokens
    from rljob_worker.records.trajectories import read_trajectories

    require_run_folder(arguments.folder)
    for option in ("worst", "best"):
        count = getattr(arguments, option)
        if count is not None and count < 1:
            raise UserError(f"--{option}: {count} is not a number of samples; use 1 or more")
    step, samples = read_trajectories(arguments.folder, arguments.step)
    tokens = read_tokens(arguments.folder, step) if arguments.tokens else None
    if tokens is not None and not len(tokens):
        raise UserError(f"--tokens: {arguments.folder} has no log-probabilities of step {step}: of an older version")
    total, about = len(samples), step_text(samples)
    if arguments.worst is not None:
        samples = sorted(samples, key=_reward)[: arguments.worst]
    elif arguments.best is not None:
        samples = sorted(samples, key=lambda sample: -_reward(sample))[: arguments.best]
    print(f"step {step}: {len(samples)} of {total} samples")
    print(about)
    for sample in samples:
        print(sample_text(sample))
        if tokens is not None:
            print(tokens_text(tokens.of(sample), sample["response_tokens"]))
    return 0


def _reward(sample: dict[str, Any]) -> float:
    """A reward that is not finite counts as the worst."""
    return -math.inf if sample["reward"] is None else float(sample["reward"])


def step_text(samples: Sequence[Mapping[str, Any]]) -> str:
    """Fate of a step's samples, their ends, and the age in updates of the tokens that were trained on."""
    decisions = Counter(sample.get("decision", "trained") for sample in samples)
    finishes = Counter(sample["finish_reason"] for sample in samples)
    ages: Counter[int] = Counter()
    masked = 0
    for sample in samples:
        if sample.get("decision") == "trained":
            for span in sample.get("spans", []):
                if span.get("masked"):
                    masked += span["tokens"]
                else:
                    ages[sample["weight_version"] - span["version"]] += span["tokens"]
    parts = [decisions.most_common(), finishes.most_common()]
    if any(ages):
        parts.append([(f"tokens {how_many(age, 'update')} old", count) for age, count in sorted(ages.items())])
    if masked:
        parts.append([("tokens too old, left out of the loss", masked)])
    return visible_line("; ".join(", ".join(f"{count} {name}" for name, count in part) for part in parts))


def sample_text(sample: dict[str, Any]) -> str:
    """One sample as readable lines; control characters are shown, not obeyed, and no line passes for another's."""
    lines = [
        f"--- {sample['prompt_uid']} sample {sample['sample']}  reward {number(sample['reward'], 4)}"
        f"  advantage {number(sample['advantage'])}  {sample['response_tokens']} tokens ({sample['finish_reason']})"
        f"  weights {_weights(sample)}{_untrained(sample)}",
        *(_texts("picture", _picture(picture)) for picture in sample.get("pictures", [])),
        _texts("prompt", sample["prompt"]),
        *(_turns(sample["turns"]) if "turns" in sample else [_texts("response", sample["response"])]),
    ]
    if sample["label"] is not None:
        lines.append(_texts("label", str(sample["label"])))
    lines += [f"  {visible_line(name)} {number(value, 4)}" for name, value in sample["reward_parts"].items()]
    lines += [_texts(f"{name} >", note) for name, note in sample.get("reward_notes", {}).items()]
    if sample["reward_error"]:
        lines.append(f"reward failed: {visible_block(sample['reward_error'], _MARGIN)}")
    return "\n".join([visible_line(lines[0]), *lines[1:]])


def tokens_text(tokens: SampleTokens | None, count: int) -> str:
    """A line for each token of a sample of `count` tokens: the log-probabilities, the ratio, and its text."""
    if tokens is None:
        return "tokens    not kept"
    lines = [f"tokens    {'engine':>10} {'trainer':>10} {'ratio':>9}  text"]
    differences = tokens.differences if tokens.differences is not None else [None] * len(tokens.texts)
    for text, engine, difference in zip(tokens.texts, tokens.engine, differences, strict=True):
        told = ("-", "-") if difference is None else (f"{engine + difference:.4f}", ratio_text(difference))
        lines.append(f"{engine:>20.4f} {told[0]:>10} {told[1]:>9}  {_quoted(text)}")
    if len(tokens.texts) < count:
        lines.append(f"{'':10}{count - len(tokens.texts):,} further tokens were not kept")
    return "\n".join(lines)


def ratio_text(difference: float) -> str:
    """The ratio of two probabilities whose logarithms differ by so much."""
    return f"{math.exp(difference):.4f}" if difference < 9 else f"e^{difference:.0f}"


def _quoted(text: str) -> str:
    """In quotes, for spaces are part of tokens."""
    return f"'{visible_line(text)}'"


def _picture(picture: Mapping[str, Any]) -> str:
    return f"{picture['width']} x {picture['height']} pixels  sha256 {picture['sha256'][:16]}"


def _turns(turns: Sequence[Mapping[str, Any]]) -> list[str]:
    """Answer of each turn, and its result."""
    lines = []
    for count, turn in enumerate(turns, 1):
        tokens = f"{turn['tokens']} token{'' if turn['tokens'] == 1 else 's'}"
        if "stream" in turn:
            tokens += f" of stream {turn['stream']}"
        lines.append(_texts(f"turn {count} <", f"{turn['action']}  ({tokens}, reward {number(turn['reward'], 4)})"))
        if turn["error"]:
            lines.append(_texts("  failed", str(turn["error"])))
        elif not turn["done"] and count < len(turns):
            lines.append(_texts("       >", turn["observation"]))
    return lines


def _texts(name: str, text: str) -> str:
    return f"{name:<10}{visible_block(text, _MARGIN)}"


def _weights(sample: dict[str, Any]) -> str:
    """Versions that sampled it: `7`, or `6 (30 tokens) 7 (12 tokens)` where there are several; older files have one."""
    spans = sample.get("spans", [])
    if len(spans) < 2:
        return str(spans[0]["version"] if spans else sample["weight_version"])
    return " ".join(f"{span['version']} ({span['tokens']} tokens)" for span in spans)


def _untrained(sample: dict[str, Any]) -> str:
    """Why a sample was not trained on; older files have only such as were."""
    decision = sample.get("decision", "trained")
    return "" if decision == "trained" else f"  {decision}"
