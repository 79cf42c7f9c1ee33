"""Set what was tuned where a user's file says how vLLM is started, and touch nothing else.

Works on YAML documents as mappings and lists, whatever library read them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import pairwise, takewhile
from typing import Any, Final, TypeVar

from tuner.emit.flags import flags
from tuner.emit.recommendation import FACT_PREFIX
from tuner.emit.script import EXPANDED, SCRIPT_FOLLOWS, arguments, masked, starts
from tuner.engine.serve_config import (
    LIVE_LIMIT_KEYS,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    hyphenated,
    twin,
)
from tuner.errors import UsageError

_T = TypeVar("_T")

_SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "zsh"})

_ENGINE_KINDS: Final = frozenset({"LLMInferenceService", "VLLMRuntime"})
"""Kinds of which every object runs vLLM, so that several are several to choose from."""

STARTS: Final = 4
"""The evidence of words that start vLLM."""
_BY_FLAG: Final = 3
_BY_IMAGE: Final = 2
_BY_NAME: Final = 1


def no_place(expected: str, got: str, hint: str = "") -> UsageError:
    """Return the error of a file that has no place for the limits."""
    return UsageError(
        f"has no place for the limits: expected {expected}, got {got}",
        hint or "check --format, or write a file of its own with -o",
    )


def find_object(documents: Sequence[Any], kinds: Sequence[str], name: str) -> dict[str, Any]:
    """Return the one document of the kinds, by name where one is given, that runs vLLM.

    Raises: UsageError if there is none, or several to choose from.
    """
    maps = [d for d in documents if isinstance(d, dict)]
    fit = [d for d in maps if d.get("kind") in kinds and name in ("", _name_of(d))]
    if len(fit) > 1 and not _ENGINE_KINDS.intersection(kinds):
        fit = running(fit, _evidence_in) or fit
    if len(fit) == 1:
        return fit[0]
    wanted = " or ".join(kinds) + (f" named {name}" if name else "")
    if not fit:
        found = ", ".join(f"{d.get('kind')} {_name_of(d)}" for d in maps if "kind" in d)
        raise no_place(f"kind: {wanted}", found or "no object of Kubernetes")
    names = ", ".join(map(_name_of, fit))
    raise no_place(f"one {wanted}", f"{len(fit)}: {names}", "choose one with --name")


def metadata_of(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the metadata of an object of Kubernetes, empty where it has none."""
    metadata = document.get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def _name_of(document: Mapping[str, Any]) -> str:
    return str(metadata_of(document).get("name", ""))


def descend(node: Any, path: Sequence[str], shown: str) -> Any:  # noqa: ANN401 - any YAML
    """Return what lies under a path of keys. Raises: UsageError, naming the path shown."""
    for key in path:
        if not isinstance(node, dict) or key not in node:
            raise no_place(shown, f"no {key}")
        node = node[key]
    return node


def find_container(
    document: Mapping[str, Any], path: Sequence[str], shown: str, name: str
) -> dict[str, Any]:
    """Return the container that runs vLLM among those under the path. Raises: UsageError."""
    listed = descend(document, (*path, "containers"), shown)
    containers = [c for c in listed if isinstance(c, dict)] if isinstance(listed, list) else []
    fit = [c for c in containers if name in ("", c.get("name"))]
    if not name:
        ranks = [_rank_in_pod(c) for c in fit]
        fit = [c for c, rank in zip(fit, ranks, strict=True) if rank == max(ranks) > 0]
        fit = [c for c in fit if c.get("name") == "vllm"] or fit
    if len(fit) == 1:
        return fit[0]
    wanted = f"one named {name}" if name else "one that runs vLLM"
    names = ", ".join(str(c.get("name")) for c in containers) or "none"
    raise no_place(f"{shown}, {wanted}", names, "choose the container with --container")


def running(candidates: Sequence[_T], evidence_of: Callable[[_T], int]) -> list[_T]:
    """Return those that run vLLM by their words or image; else those that by their name do.

    Each of several workloads may run an engine, so that better evidence rules out none.
    """
    ranks = [evidence_of(each) for each in candidates]
    least = _BY_IMAGE if max(ranks, default=0) >= _BY_IMAGE else _BY_NAME
    return [each for each, rank in zip(candidates, ranks, strict=True) if rank >= least]


def evidence(
    holder: Mapping[str, Any], name: object, keys: tuple[str, ...] = ("args", "command")
) -> int:
    """Return how surely a container runs vLLM, 0 to 4.

    4 by words that start it, 3 by one of its limits, 2 by its image, 1 by its name. What only
    mentions vLLM, as a proxy in front of it does, runs another program.
    """
    texts: list[str] = []
    for key in reversed(keys):
        value = holder.get(key)
        texts += map(str, value) if isinstance(value, list) else [str(value or "")]
    is_made_by_chart = holder.get("modelCommand") in ("vllmServe", "imageDefault")
    if is_made_by_chart or any(map(starts, [*texts, " ".join(texts)])):
        return STARTS
    limits = [re.compile(_whole_flag(key, 0)) for key in (MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)]
    if any(limit.search(masked(text)) for text in texts for limit in limits):
        return _BY_FLAG
    image = holder.get("image")
    if isinstance(image, str) and "vllm" in image.lower():
        return _BY_IMAGE
    return _BY_NAME if "vllm" in str(name).lower() else 0


def _rank_in_pod(container: Mapping[str, Any]) -> int:
    """Return the evidence of a container among those of its pod, which runs one engine."""
    name = container.get("name")
    return max(evidence(container, name), _BY_IMAGE if name == "vllm" else 0)


def _evidence_in(node: object) -> int:
    """Return the best evidence of all containers in an object of Kubernetes."""
    if isinstance(node, list):
        return max(map(_evidence_in, node), default=0)
    if not isinstance(node, dict):
        return 0
    if {"args", "command", "image"} & node.keys():
        return evidence(node, node.get("name"))
    parts = [value for key, value in node.items() if key != "initContainers"]
    return max(map(_evidence_in, parts), default=0)


def edit_container(
    holder: dict[str, Any],
    tuned: Mapping[str, object],
    shown: str,
    keys: tuple[str, ...] = ("args", "command"),
) -> None:
    """Set what was tuned in the arguments of a container, listed or in lines of text.

    Lines that start vLLM get what is nowhere yet; else the texts and lists under the first key
    do, and under the others only lists, as a text there starts something else.

    Raises: UsageError if it has no arguments, or a shell's script that does not start vLLM.
    """
    values = [holder[key] for key in keys if isinstance(holder.get(key), str | list)]
    lists = [value for value in values if isinstance(value, list)]
    lines = list(_lines(holder, keys))
    if not lines and _is_shell(_words(holder, keys)):
        raise no_place(f"a line with `vllm serve` under {shown}", "a script without one")
    if not lines and isinstance(holder.get(keys[0]), str):
        lines = [(holder, keys[0])]
    if lines:
        _edit_lines(holder, lines, keys, tuned)
        return
    if not lists:
        got = "a text that does not start vLLM" if values else "neither"
        raise no_place(f"{shown}.{keys[0]} or .{keys[1]}", got)
    _check_words(lists, shown)
    for key, value in tuned.items():
        put_flag(lists, key, value)
    drop_caps(lists)


def _lines(holder: dict[str, Any], keys: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    """Yield where a text starts vLLM: its parent and its place there."""
    for key in keys:
        value = holder.get(key)
        if isinstance(value, str) and starts(value):
            yield holder, key
        elif isinstance(value, list):
            for place, word in enumerate(value):
                if isinstance(word, str) and starts(word) and " " in word.strip():
                    yield value, place


def _edit_lines(
    holder: dict[str, Any],
    lines: Sequence[tuple[Any, Any]],
    keys: Sequence[str],
    tuned: Mapping[str, object],
) -> None:
    """Set what was tuned in lines of text, and its flags that stand in words beside them.

    Behind a shell's script they are its parameters, which vLLM gets where its command has them.
    """
    texts = [parent[place] for parent, place in lines]
    reach = not _is_shell(_words(holder, keys)) or any(map(_takes_parameters, texts))
    others = [key for key in keys if reach and (holder, key) not in lines]
    beside = [(holder, key) for key in others if isinstance(holder.get(key), str)]
    lists = [holder[key] for key in others if isinstance(holder.get(key), list)]
    missing = dict(tuned)
    for key, value in tuned.items():
        if not _is_one_word(value):
            _drop_whole(lists, key, value)
        elif True in [set_flag(words, key, value) for words in lists] or any(
            _flag_pattern(key).search(masked(parent[place])) for parent, place in beside
        ):
            del missing[key]
    drop_caps(lists)
    for parent, place in beside:
        text = _with_values(parent[place], tuned)
        held = {key: tuned[key] for key in tuned if _flag_pattern(key).search(masked(text))}
        parent[place] = like(parent[place], _with_flags(text, held))
    for parent, place in lines:
        text = _with_flags(_with_values(parent[place], tuned), missing)
        parent[place] = like(parent[place], text)


def _takes_parameters(script: str) -> bool:
    """Whether a script starts vLLM with words that stand behind the script.

    >>> [_takes_parameters(text) for text in ('vllm serve "$@"', 'echo "$@"; vllm serve m')]
    [True, False]
    """
    parts = [script[start.begin : start.end] for start in starts(script)]
    return any(re.search(r"\$\{?[@*1-9]", part) for part in parts)


def _words(holder: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """Return the words of a container's command with those of its arguments behind them."""
    values = [holder.get(key) for key in reversed(keys)]
    lists = [value.split() if isinstance(value, str) else value for value in values]
    return [str(word) for words in lists if isinstance(words, list) for word in words]


def _is_shell(words: Sequence[str]) -> bool:
    """Whether words begin a shell that reads a script from one of them.

    >>> [_is_shell(text.split()) for text in ("tini -- bash -eo pipefail -c", "sh run.sh -c")]
    [True, False]
    """
    places = [place for place, text in enumerate(words) if text.rpartition("/")[2] in _SHELLS]
    is_name = False
    for word in words[places[0] + 1 :] if places else ():
        if SCRIPT_FOLLOWS.fullmatch(word):
            return True
        if not is_name and word[:1] not in {"-", "+"}:
            return False
        # The name of an option follows, as in `-eo pipefail`.
        is_name = not is_name and word.endswith("o")
    return False


def _check_words(lists: Sequence[Sequence[object]], shown: str) -> None:
    """Refuse a limit within a longer word, which another program reads. Raises: UsageError."""
    for key in (MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS):
        name = _name_pattern(key)
        within = re.compile(rf"(?<=[\s='\"]){name}(?![-\w])|{name}\s+\S")
        if any(within.search(str(word)) for words in lists for word in words):
            raise no_place(
                f"--{key} and its value as words of their own under {shown}",
                "both within a longer one",
                "set both limits there by hand",
            )


def edit_line(line: str, tuned: Mapping[str, object]) -> str:
    """Return a command line with what was tuned set, and without what would cap the limits.

    A script gets both limits at each command of it that starts vLLM; comments stay as they are.

    Raises: UsageError if another command makes the value of a flag.

    >>> tuned = {"max-num-seqs": 8, "enable-prefix-caching": False}
    >>> edit_line("vllm serve m --max_num_seqs 256 --enable-prefix-caching && echo", tuned)
    'vllm serve m --no-enable-prefix-caching --max_num_seqs 8 && echo'
    """
    return _with_flags(_with_values(line, tuned), tuned)


def _with_values(line: str, tuned: Mapping[str, object]) -> str:
    """Return the line with new values for the flags that have one, without other flags."""
    for key, value in tuned.items():
        if _is_one_word(value):
            _check_values(line, key)
            line = _replaced(line, _flag_pattern(key), rf"\g<flag>{value}")
        else:
            line = _replaced(line, re.compile(r"[ \t]*" + _whole_flag(key, value)), "")
    for key in LIVE_LIMIT_KEYS:
        _check_values(line, key)
        line = _replaced(line, re.compile(r"[ \t]*" + _flag_pattern(key).pattern), "")
    return line


def _with_flags(line: str, tuned: Mapping[str, object]) -> str:
    """Return the line with each flag at every start of vLLM that has none of its own.

    One in front of a variable does not count: of flags that stand twice vLLM takes the last.
    """
    for key, value in tuned.items():
        flag, code = _flag_pattern(key), _code_for_good(line)
        words = f" {' '.join(flags({key: value}))}"
        for start in reversed(starts(line) or [arguments(line)]):
            if not flag.search(code, start.settled_at, start.end):
                at = (
                    start.end
                    if _has_short(code[start.begin : start.end], key)
                    else start.flags_at
                )
                line = line[:at] + words + line[at:]
    return line


def _has_short(command: str, key: str) -> bool:
    """Whether a command has a flag shortened, as in `--max-num-seq`, which vLLM takes."""
    return any(key.startswith(hyphenated(name)) for name in re.findall(r"--([\w-]+)", command))


def _code_for_good(line: str) -> str:
    """Return the line without comments and what a variable brings only where it is set."""
    return re.sub(EXPANDED, lambda found: "\0" * len(found[0]), masked(line))


def _replaced(line: str, pattern: re.Pattern[str], text: str) -> str:
    """Return the line with what matches replaced everywhere but in comments."""
    for found in reversed(list(pattern.finditer(masked(line)))):
        line = line[: found.start()] + found.expand(text) + line[found.end() :]
    return line


_SEPARATOR: Final = r"(?:=|(?:\s|\\\n)++)"
_DOLLAR: Final = r"\$(?![({])"
_PLAIN: Final = r"[^{}\s`$]|" + _DOLLAR
_VARIABLE: Final = rf"\$\{{(?:{_PLAIN}|\$\{{(?:{_PLAIN})*+\}})*+\}}"
# A value whose end is known: it ends at an operator or the brace of an expansion around it, and
# neither another command nor a part in other quotes makes a part of it.
_VALUE: Final = (
    rf"(?:\"(?:[^\"$`\\]|{_DOLLAR}|{_VARIABLE})*+\"|'[^']*+'"
    rf"|(?:[^\s\"'\\;&|()<>`${{}}]|{_DOLLAR}|{_VARIABLE})++)(?![\w`$(]|[\"'][\w$])"
)


def last_value(line: str, key: str) -> str | None:
    """Return the value of the last such flag of a command line, or None where it has none.

    Nor has it one where a variable follows that may hold the same flag.

    >>> last_value(
    ...     "A=(--max-num-seqs '16'); vllm serve m $A # --max-num-seqs 2", "max-num-seqs"
    ... )
    '16'
    >>> last_value("vllm serve m --max-num-seqs 16 $MORE", "max-num-seqs")
    """
    code = _code_for_good(line)
    for start in starts(line) or [arguments(line)]:
        unsettled = "\0" * (start.settled_at - start.begin)
        code = code[: start.begin] + unsettled + code[start.settled_at :]
    found = [each[0] for each in _flag_pattern(key).finditer(code)]
    return re.split(r"[=\s]", found[-1])[-1].strip("'\"") if found else None


def _flag_pattern(key: str) -> re.Pattern[str]:
    """Return a pattern for a flag, in either spelling, with the value that follows it."""
    return re.compile(rf"(?P<flag>{_name_pattern(key)}{_SEPARATOR}){_VALUE}")


def _name_pattern(key: str) -> str:
    return f"--{key.replace('-', '[-_]')}"


def _check_values(line: str, key: str) -> None:
    """Refuse a value that cannot be told from what follows it. Raises: UsageError."""
    name = _name_pattern(key)
    unread = rf"{name}{_SEPARATOR}(?!{_VALUE})\S*?[`$\\\"'{{}}]|{name}['\"]\s+['\"$\d]"
    if re.search(unread, masked(line)):
        raise no_place(
            f"a plain value behind --{key}, as in `--{key} 256`",
            "`$(…)`, backquotes, braces or several parts in quotes",
            "write a number there, which is then replaced",
        )


def _is_one_word(value: object) -> bool:
    """Whether a value is a single word behind its flag: not a switch, and no list."""
    return not isinstance(value, bool | list)


def _whole_flag(key: str, value: object) -> str:
    """Return a pattern for a switch in both of its spellings, or for a flag with its list."""
    name = key.replace("-", "[-_]")
    words = r"(?:(?:=|\s)+\d+)*" if isinstance(value, list) else ""
    return rf"--(?:no[-_])?{name}(?![-_\w]){words}"


def put_flag(lists: Sequence[list[Any]], key: str, value: object) -> None:
    """Give a flag its value wherever it stands among lists of words, or add it to the first.

    Every occurrence, because vLLM takes the last one.
    """
    if _is_one_word(value):
        if True not in [set_flag(words, key, value) for words in lists]:
            add_flag(lists[0], key, value)
        return
    wanted = flags({key: value})
    names = {key, twin(key)}
    standing = [w for words in lists for w in words if key_of(w) in names]
    if len(standing) == 1 and any(_holds(words, wanted) for words in lists):
        return
    _drop_whole(lists, key, value)
    pattern = next((word for word in reversed(lists[0]) if isinstance(word, str)), "")
    lists[0].extend(like(pattern, word) for word in wanted)


def _drop_whole(lists: Sequence[list[Any]], key: str, value: object) -> None:
    """Take a switch in both of its spellings out of the words, or a flag with its list."""
    for words in lists:
        for name in (key, twin(key)):
            drop_flag(words, name, takes=len(words) if isinstance(value, list) else 0)


def key_of(word: object) -> str:
    """Return the key of a flag, "" for other words."""
    flag = str(word).partition("=")[0]
    return hyphenated(flag[2:]) if flag.startswith("--") else ""


def _holds(words: Sequence[object], wanted: Sequence[str]) -> bool:
    """Whether words are among others, one after the other, and no value follows them."""
    texts, n = [str(word) for word in words], len(wanted)
    return any(
        texts[i : i + n] == [*wanted] and (i + n == len(texts) or texts[i + n][:2] == "--")
        for i in range(len(texts) - n + 1)
    )


def set_flag(words: list[Any], key: str, value: object) -> bool:
    """Give a flag that stands among the words its value, in the form it has there."""
    was_there = False
    for place, word in enumerate(words):
        if key_of(word) != key:
            continue
        was_there = True
        flag, equals, _ = str(word).partition("=")
        if equals:
            words[place] = like(word, f"{flag}={value}")
        elif place + 1 < len(words):
            words[place + 1] = like(words[place + 1], str(value))
        else:
            words.append(like(word, str(value)))
    return was_there


def add_flag(words: list[Any], key: str, value: object) -> None:
    """Put a flag behind the words, in one word or two as the others are."""
    texts = ["=" if "=" in str(word) else str(word) for word in words]
    is_split = any(
        flag.startswith("--") and not value.startswith(("-", "="))
        for flag, value in pairwise(texts)
    )
    pattern = next((word for word in reversed(words) if isinstance(word, str)), "")
    if is_split:
        words.extend([like(pattern, f"--{key}"), like(pattern, str(value))])
    else:
        words.append(like(pattern, f"--{key}={value}"))


def drop_flag(words: list[Any], key: str, takes: int = 1) -> None:
    """Take a flag out of the words, with at most so many that follow and are no flags."""
    for place in range(len(words) - 1, -1, -1):
        if key_of(words[place]) == key:
            taken = () if "=" in str(words[place]) else words[place + 1 : place + 1 + takes]
            behind = takewhile(lambda word: not str(word).startswith("--"), taken)
            del words[place : place + 1 + len([*behind])]


def drop_caps(lists: Sequence[list[Any]]) -> None:
    """Take what would cap the limits out of lists of words."""
    for words in lists:
        for key in LIVE_LIMIT_KEYS:
            drop_flag(words, key)


def like(old: object, text: str) -> object:
    """Return a text in the kind of quotes, or the block, that an old one stands in."""
    if not isinstance(old, str):
        return int(text) if isinstance(old, int) and text.isdigit() else text
    made = type(old)(text)
    if comment := getattr(old, "comment", None):
        setattr(made, "comment", comment)  # noqa: B010 - an attribute of ruamel.yaml's blocks
    if folds := getattr(old, "fold_pos", None):
        setattr(made, "fold_pos", _moved(folds, old, text))  # noqa: B010 - as above
    return made


def _moved(folds: Sequence[int], old: str, text: str) -> list[int]:
    """Return where a folded block is folded after a change: at the blanks that it still has."""
    kept = SequenceMatcher(None, old, text, autojunk=False).get_matching_blocks()
    return [
        block.b + fold - block.a
        for fold in folds
        for block in kept
        if block.a <= fold < block.a + block.size
    ]


def annotate(document: dict[str, Any], annotations: Mapping[str, str]) -> None:
    """Put the provenance among the annotations of an object."""
    if annotations or isinstance(document.get("metadata"), dict):
        merge_map(document.setdefault("metadata", {}), "annotations", annotations)


def merge_map(holder: dict[str, Any], key: str, values: Mapping[str, str]) -> None:
    """Set the values in the mapping under a key, which is made where there is none."""
    if isinstance(holder.get(key), dict):
        for stale in [name for name in holder[key] if _is_stale(name, values)]:
            del holder[key][stale]
        holder[key].update(values)
    elif values:
        holder[key] = dict(values)


def _is_stale(name: object, values: Mapping[str, str]) -> bool:
    """Return whether a name files what an earlier tuning found and this one does not say."""
    return str(name).startswith(FACT_PREFIX) and name not in values


def label(holder: dict[str, Any], labels: Mapping[str, str]) -> None:
    """Put the provenance among the labels of a Compose service, a mapping or a list."""
    listed = holder.get("labels")
    if not isinstance(listed, list):
        merge_map(holder, "labels", labels)
        return
    for place in reversed(range(len(listed))):
        if _is_stale(str(listed[place]).partition("=")[0], labels):
            del listed[place]
    for key, text in labels.items():
        places = [i for i, word in enumerate(listed) if str(word).partition("=")[0] == key]
        if places:
            listed[places[0]] = like(listed[places[0]], f"{key}={text}")
        else:
            listed.append(f"{key}={text}")
