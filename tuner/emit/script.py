"""Find where a shell's script starts vLLM, and which parts of it are comments.

A script is read as a shell reads it, into commands of words, so that neither a message nor a
comment with the same words is taken for the command. What a variable holds is not known: a
command line that stands in one counts where nothing else starts vLLM.

Source: POSIX.1-2024, Shell Command Language, sections 2.2, 2.3, 2.7 and 2.9.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

_NESTED: Final = r"\$\((?:[^()]|\((?:[^()]|\([^()]*+\))*+\))*+\)"
EXPANDED: Final = r"\$\{(?:[^{}\n]|\$\{[^{}\n]*+\})*+\}"
_TOKEN: Final = re.compile(
    r"(?P<blank>(?:[ \t\r]|\\\n)++)"
    r"|(?P<comment>#[^\n]*+)"
    r"|<<(?!<)-?[ \t]*+\\?['\"]?(?P<document>\w+)['\"]?"
    r"|(?P<redirection>\d*(?:<<<|>>|>\||[<>]&|<>|[<>])|&>>?)"
    r"|(?P<end>[\n;&|()])"
    rf"|(?P<word>(?:'[^']*+'|\"(?:\\.|{_NESTED}|[^\"\\])*+\"|{_NESTED}|{EXPANDED}|`[^`]*+`"
    r"|\\.|[^\s;&|()<>'\"`\\])++)"
    r"|.",
    re.DOTALL,
)
_KEYWORDS: Final = frozenset({"if", "then", "else", "elif", "do", "while", "until", "!", "{"})
_ASSIGNED: Final = re.compile(r"\w+\+?=(?P<text>.*)", re.DOTALL)
SCRIPT_FOLLOWS: Final = re.compile(r"-[a-zA-Z]*c|eval")
"""A word of a shell's command whose next one is a script: `-c`, `-lc`, `-eEuc`."""
_MODULE: Final = re.compile(r"vllm\.entrypoints\.[\w.]+")
_WRAPPERS: Final = re.compile(
    r"exec|command|env|nohup|time|timeout|nice|ionice|chrt|numactl|taskset|setsid|stdbuf|sudo"
    r"|su|gosu|su-exec|setpriv|runuser|chroot|tini|dumb-init|catatonit|uv|poetry|conda|srun"
    r"|mpirun|nsys|ncu|ddtrace-run|opentelemetry-instrument|torchrun|python[\d.]*"
)
"""Commands that start the one which is named behind their own options."""
_NO_WRAPPERS: Final = frozenset(
    {"echo", "printf", "logger", "log", "grep", "pgrep", "pkill", "test", "[", "[[", ":"}
    | {"for", "case", "cat", "which", "type", "alias", "trap", "sed", "awk"}
)
"""Commands that only speak of what is named behind them, or look for it."""
_SETTERS: Final = frozenset({"set", "export", "declare", "local", "readonly", "typeset"})
"""Commands that keep words for a later one."""
_PROGRAM: Final = re.compile(r"\w[\w.+-]*(?<!\.sh)(?<!\.bash)")
# A variable as a word of its own, without `${X:+--port $X}`, which says what it brings.
_VARIABLE: Final = re.compile(r"['\"]?\$(?!\{\w+:?\+-)")
_SEVERAL_WORDS: Final = re.compile(r"['\"]?\$\{?(?:\w+\[)?[@*]")
_SWITCHES: Final = ("--no-", "--enable-", "--disable-", "--enforce-", "--trust-")
"""How flags begin behind which no value follows: ours, by how vLLM names them."""


@dataclass(frozen=True, slots=True)
class Start:
    """A command that starts vLLM, from its first word to its last, and where flags go in.

    What a flag says in front of `settled_at` a variable may say otherwise. All are offsets in
    the script, in characters.
    """

    begin: int
    flags_at: int
    end: int
    settled_at: int


@dataclass(frozen=True, slots=True)
class _Word:
    begin: int
    end: int
    text: str


@dataclass(slots=True)
class _Read:
    """What was found so far: commands, starts of vLLM, and by their offsets what is no start.

    Comments are not, and neither are commands of other programs.
    """

    commands: list[list[_Word]] = field(default_factory=list)
    sure: list[Start] = field(default_factory=list)
    likely: list[Start] = field(default_factory=list)
    comments: list[tuple[int, int]] = field(default_factory=list)
    others: list[tuple[int, int]] = field(default_factory=list)


def starts(script: str) -> list[Start]:
    """Return the commands that start vLLM, in their order.

    >>> script = "echo vllm serve; A=1 nohup vllm serve m --port 1 &"
    >>> [script[start.begin : start.end] for start in starts(script)]
    ['vllm serve m --port 1']
    """
    read = _read(script)
    return sorted(read.sure or read.likely, key=lambda start: start.begin)


def arguments(text: str) -> Start:
    """Return a text of arguments alone as one start of vLLM, which gets flags at its end."""
    words = [word for command in _read(text).commands for word in command]
    end = len(text.rstrip())
    return Start(0, end, end, _last_variable(words))


def commands(script: str) -> list[list[str]]:
    """Return the words of each command as they are written, with their quotes.

    >>> commands("A=1 vllm serve 'm m' >log && wait # for it")
    [['A=1', 'vllm', 'serve', "'m m'"], ['wait']]
    """
    return [[word.text for word in words] for words in _read(script).commands if words]


def masked(script: str) -> str:
    r"""Return the script with each character replaced by a null that is none of vLLM's.

    Those of comments are, and those of other programs' commands beside one that starts vLLM.

    >>> masked("a # b")
    'a \x00\x00\x00'
    >>> masked("a --port 1; vllm serve m")
    '\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00; vllm serve m'
    """
    read = _read(script)
    for begin, end in [*read.comments, *(read.others if read.sure else ())]:
        script = script[:begin] + "\0" * (end - begin) + script[end:]
    return script


def _read(script: str) -> _Read:
    read = _Read()
    _read_commands(script, 0, len(script), read)
    return read


def _read_commands(
    script: str, at: int, end: int, read: _Read, *, in_document: bool = False
) -> None:
    """Read the commands between two offsets; no document within a document is told apart."""
    words: list[_Word] = []
    documents: list[str] = []
    is_target = False
    while at < end and (found := _TOKEN.match(script, at, end)):
        at = found.end()
        if found["comment"]:
            read.comments.append(found.span())
        elif found["document"]:
            documents += [] if in_document else [found["document"]]
        elif found["redirection"]:
            is_target = True
        elif found["end"]:
            _read_command(script, words, read)
            words, is_target = [], False
            if found["end"] == "\n":
                at, documents = _read_documents(script, at, end, documents, read), []
        elif not found["blank"]:
            # A file that is written to or read from is no argument of the command.
            words += [] if is_target else [_Word(*found.span(), found.group())]
            is_target = False
    _read_command(script, words, read)


def _read_documents(script: str, at: int, end: int, documents: list[str], read: _Read) -> int:
    """Read what stands in here-documents as scripts of their own; return where they end."""
    for name in documents:
        mark = re.compile(rf"^\t*{name}$", re.MULTILINE).search(script, at, end)
        known = len(read.others)
        _read_commands(script, at, mark.start() if mark else end, read, in_document=True)
        # A document may as well be no script.
        del read.others[known:]
        at = mark.end() if mark else end
    return at


def _read_command(script: str, words: list[_Word], read: _Read) -> None:
    """Note one command, and the starts of vLLM in it and in the scripts among its words."""
    read.commands.append(words)
    for before, word in zip([None, *words], words, strict=False):
        if before is not None and SCRIPT_FOLLOWS.fullmatch(before.text):
            _read_quoted(script, word, 0, read)
        elif assigned := _ASSIGNED.fullmatch(word.text):
            inner = _Read()
            _read_quoted(script, word, assigned.start("text"), inner)
            read.likely += inner.sure
    while words and (words[0].text in _KEYWORDS or _ASSIGNED.fullmatch(words[0].text)):
        words = words[1:]
    start = _start_in(words)
    if start is None:
        if words and _is_of_another(words, script):
            read.others.append((words[0].begin, words[-1].end))
        return
    first = words[0].text.strip("'\"").rpartition("/")[2]
    if start.begin == words[0].begin or _WRAPPERS.fullmatch(first):
        read.sure.append(start)
    elif first not in _NO_WRAPPERS:
        read.likely.append(start)


def _is_of_another(words: list[_Word], script: str) -> bool:
    """Whether a command starts a program by itself that is not to start vLLM.

    One that keeps words for vLLM, that speaks of it, or is of the script or another script may.
    """
    name = words[0].text
    if not _PROGRAM.fullmatch(name) or _WRAPPERS.fullmatch(name):
        return False
    is_own = re.search(rf"\b{re.escape(name)}\s*\(\)|\bfunction\s+{re.escape(name)}\b", script)
    may = any("vllm" in word.text or SCRIPT_FOLLOWS.fullmatch(word.text) for word in words)
    return name not in _NO_WRAPPERS | _SETTERS and not is_own and not may


def _read_quoted(script: str, word: _Word, skipped: int, read: _Read) -> None:
    """Read the script that is quoted in a word, behind so many characters of it."""
    quote = word.text[skipped : skipped + 1]
    if quote in {"'", '"'} and word.text.endswith(quote) and len(word.text) > skipped + 1:
        _read_commands(script, word.begin + skipped + 1, word.end - 1, read)


def _start_in(words: list[_Word]) -> Start | None:
    """Return where the words of one command name vLLM's server, if they do."""
    texts = [word.text.strip("'\"") for word in words]
    for place, text in enumerate(texts):
        if _MODULE.fullmatch(text):
            return _start(words[place:], 1)
        if text.rpartition("/")[2] == "vllm" and texts[place + 1 : place + 2] == ["serve"]:
            has_model = any(word.text[0] != "-" for word in words[place + 2 : place + 3])
            return _start(words[place:], 3 if has_model else 2)
    return None


def _start(words: list[_Word], first: int) -> Start:
    """Return a start of vLLM that names its server, and its model, in so many first words.

    Flags go right behind them, or last where a variable that follows may hold the same flags:
    of those that stand twice vLLM takes the last.
    """
    has_variable = any(word.text.strip("'\"").startswith("$") for word in words[first:])
    before = words[-1] if has_variable else words[first - 1]
    settled_at = max(words[0].begin, _last_variable(words[first - 1 :]))
    return Start(words[0].begin, before.end, words[-1].end, settled_at)


def _last_variable(words: list[_Word]) -> int:
    """Return where the last variable ends that may hold flags, and no flag's value; 0 if none.

    The first word is none of them.
    """
    last = 0
    for before, word in pairwise(words):
        flag = before.text.replace("_", "-")
        is_value = flag[0] == "-" and "=" not in flag and not flag.startswith(_SWITCHES)
        if _VARIABLE.match(word.text) and (_SEVERAL_WORDS.match(word.text) or not is_value):
            last = word.end
    return last
