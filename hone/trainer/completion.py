"""`hone completion bash|zsh` prints a script that completes the verbs and short keys of `hone` in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from hone.config.short_keys import short_keys_of
from hone.config.trees import TREES

_BASH = """_hone() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words="{verbs}"
    if [ "$COMP_CWORD" -gt 1 ]; then
        case "${{COMP_WORDS[1]}}" in
{cases}
            *) words="" ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    case "${{COMPREPLY[0]}}" in *=) compopt -o nospace 2>/dev/null ;; esac
}}
complete -o default -F _hone hone
"""
_ZSH = """_hone() {{
    if (( CURRENT == 2 )); then
        compadd -- {verbs}
        return
    fi
    case "$words[2]" in
{cases}
    esac
    _files
}}
compdef _hone hone
"""


def script(shell: str, parser: argparse.ArgumentParser, schema_by_verb: Mapping[str, str]) -> str:
    """Returns the script of a shell, `bash` or `zsh`, for the verbs of a parser and the short keys of the
    verbs with a schema."""
    (action,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    case = (
        "        {}) compadd -S '' -- {} ;;" if shell == "zsh" else '            {}) words="{}" ;;'
    )
    cases = [
        case.format(verb, " ".join(f"{name}=" for name in short_keys_of(TREES[schema].root)))
        for verb, schema in schema_by_verb.items()
    ]
    template = _ZSH if shell == "zsh" else _BASH
    return template.format(verbs=" ".join(action.choices), cases="\n".join(cases))
