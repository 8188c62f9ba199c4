"""`rljob completion`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

_DESCRIPTION = """Print a script with which the Tab key completes commands, options, their values, files and folders.

examples:
  rljob completion bash > ~/.local/share/bash-completion/completions/rljob
  rljob completion zsh > ~/.zfunc/_rljob        (a folder in fpath)"""
_BASH = """\
_rljob() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=
  case "${{COMP_WORDS[1]}} $before" in
{values}
    *) if [[ $COMP_CWORD -eq 1 ]]; then words="{commands}"
    elif [[ $word == -* ]]; then case "${{COMP_WORDS[1]}}" in
{options}
    esac
    elif [[ $COMP_CWORD -eq 2 ]]; then case "${{COMP_WORDS[1]}}" in
{arguments}
    esac; fi ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _rljob rljob"""
# Without a word of its own the shell completes files and folders (`-o default`).
_ZSH = """\
#compdef rljob
autoload -Uz bashcompinit && bashcompinit
{bash}
[[ $funcstack[1] == _rljob ]] && _bash_complete -o default -F _rljob"""
# zsh reads a file in fpath at the first Tab and expects an answer of it then.


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    command = commands.add_parser(
        "completion",
        help="print a script for the shell's Tab key",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("shell", choices=("bash", "zsh"), help="the shell that reads it")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    from rljob_worker.cli.main import parser

    script = bash_script(parser())
    print(_ZSH.format(bash=script) if arguments.shell == "zsh" else script)
    return 0


def bash_script(grammar: argparse.ArgumentParser) -> str:
    """A completion function of bash for the commands of a grammar, which also zsh's bashcompinit takes."""
    commands = dict(_commands(grammar))
    options, arguments, values = [], [], []
    for name, command in commands.items():
        found = [option for action in command._actions for option in action.option_strings]
        options.append(f'      {name}) words="{" ".join(found)}" ;;')
        for action in command._actions:
            choices = " ".join(map(str, action.choices or ()))
            if not action.option_strings and choices:
                arguments.append(f'      {name}) words="{choices}" ;;')
            elif action.option_strings and action.nargs != 0:
                cases = "|".join(f'"{name} {option}"' for option in action.option_strings)
                values.append(f'    {cases}) words="{choices}" ;;')
    lines = {"options": options, "arguments": arguments, "values": values}
    return _BASH.format(commands=" ".join(commands), **{name: "\n".join(of) for name, of in lines.items()})


def _commands(grammar: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in grammar._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()
