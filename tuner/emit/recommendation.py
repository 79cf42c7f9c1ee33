"""What is deployed: the user's configuration with the tuned limits, and where they come from.

Answers which settings a file may hold and how it is named and commented.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Final

from tuner.emit.comments import DECIDED_BY, SET_BESIDE
from tuner.emit.yaml_text import commented
from tuner.engine.limits import EngineLimits
from tuner.engine.serve_config import (
    LIVE_LIMIT_KEYS,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    changed,
    human_integer,
    hyphenated,
    twin,
)
from tuner.errors import UsageError
from tuner.redact import REDACTED, has_secrets
from tuner.run.knobs.records import settings_text
from tuner.run.records import Advice
from tuner.run.result import RunResult

CAPPED: Final = "which would cap the tuned limits"
"""How the remark on a key ends that is left out because it would undo the tuning."""

EXACT: Final = "as tuned; needs vLLM 0.32 or later"
"""How the remark on the four limits ends that repeat a measured point."""

FACT_PREFIX: Final = "max-num-seqs-tuner/"
"""What provenance is filed under where a target has annotations or labels."""

API_KEY: Final = "api-key"
"""The secret that guards the server: without it vLLM answers anybody, and no start fails.

Source: FrontendArgs in vLLM's vllm/entrypoints/launchers/cli_args.py.
"""

API_KEY_ENV: Final = "VLLM_API_KEY"
"""Where vLLM looks for the key that no flag gives; empty, it is as good as none.

Source: vLLM vllm/entrypoints/serve/middleware/register.py, init_entrypoints_middleware.
"""

_ENV_NAMES: Final = {API_KEY: API_KEY_ENV, "hf-token": "HF_TOKEN"}
"""Where vLLM and the hub's client look for a secret that no flag gives.

Source: vLLM vllm/envs.py; huggingface_hub, constants of the environment.
"""

_KEPT_BACK: Final = re.compile(r"left out (?P<key>[\w.-]+), which is a secret: .*")
"""The remark on a secret that a file does not hold, by which the next reader finds it."""

# Kubernetes bounds a label at 63 characters; charts append words of their own: ours.
_LONGEST_NAME = 40


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A configuration to deploy, with the evidence that stands beside it.

    `values` are the user's own, in vLLM's spelling. `facts` are provenance by name, for
    annotations; `comments` the same and more in sentences. `started_at` are the limits of the
    engine that was measured, None where they are unknown.
    """

    values: Mapping[str, object]
    limits: EngineLimits
    comments: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    started_at: EngineLimits | None = None
    lost: tuple[str, ...] = ()
    """Keys whose secret was not kept and has to be given again."""
    knobs: Mapping[str, object] = field(default_factory=dict)
    """What is set beside the limits, by key."""
    allow_unauthenticated: bool = False
    """Whether the user wants a server without the api-key that the configuration has."""

    @property
    def tuned(self) -> dict[str, object]:
        """What was tuned, by vLLM's keys: both limits, and the knobs that pay."""
        return {
            MAX_NUM_SEQS: self.limits.max_num_seqs,
            MAX_NUM_BATCHED_TOKENS: self.limits.max_num_batched_tokens,
            **self.knobs,
        }

    @property
    def settings(self) -> dict[str, object]:
        """The whole configuration: the user's keys in their order, what was tuned set."""
        spelled = changed(self.values, self.tuned)
        return {key: value for key, value in spelled.items() if key not in LIVE_LIMIT_KEYS}

    @property
    def shared(self) -> dict[str, object]:
        """The settings that a file may hold which many people read: no secrets."""
        return {key: v for key, v in self.settings.items() if not has_secrets({key: v})}

    @property
    def has_api_key(self) -> bool:
        """Whether the configuration has an api-key, be it known or lost."""
        return API_KEY in {*self.settings, *map(hyphenated, self.lost)}

    @property
    def requires_api_key(self) -> bool:
        """Whether a server of this configuration must not start without its api-key."""
        return self.has_api_key and not self.allow_unauthenticated

    def flags_but(self, *keys: str) -> dict[str, object]:
        """Return the shared settings without the model and the keys that a target sets itself.

        A switch goes in both of its spellings.
        """
        gone = {"model", *keys, *(twin(key) for key in keys)}
        return {key: value for key, value in self.shared.items() if key not in gone}

    def is_on(self, switch: str) -> bool:
        """Return whether a switch is on, under either of its two names, or left at that."""
        settings = self.settings
        if switch in settings:
            return settings[switch] is not False
        return twin(switch) not in settings or settings[twin(switch)] is False

    def number(self, key: str, default: int) -> int:
        """Return a whole number among the settings, the default where the key is not set.

        A text counts where vLLM itself reads it as a number. Raises: UsageError, naming the key
        of a value that is no whole number.
        """
        value = self.settings.get(key, default)
        number = human_integer(value) if isinstance(value, str) else value
        if isinstance(number, bool) or not isinstance(number, int):
            raise UsageError(
                f"{key} must be a whole number, got {value!r}",
                f"write it in the configuration as in `{key}: {default}`",
            )
        return number

    @property
    def model(self) -> str:
        """The model's name on a hub, or its folder."""
        return str(self.values["model"])

    @property
    def is_folder(self) -> bool:
        """Whether the model is a folder of the machine that was tuned on."""
        is_path = self.model.startswith((".", "/", "~")) or self.model.count("/") > 1
        return is_path and not self.is_address

    @property
    def is_address(self) -> bool:
        """Whether the model is loaded from an address, as in s3://bucket/model."""
        return "://" in self.model

    @property
    def name(self) -> str:
        """A name for Kubernetes objects, made from the model's.

        >>> limits = EngineLimits(8, 2048)
        >>> Recommendation({"model": "Qwen/Qwen2.5-7B-Instruct"}, limits).name
        'qwen2-5-7b-instruct'
        """
        last = self.model.rstrip("/").rpartition("/")[2].lower()
        label = re.sub(r"[^a-z0-9]+", "-", last).strip("-")[:_LONGEST_NAME].strip("-")
        if not label:
            return "vllm"
        return label if label[0].isalpha() else f"m-{label}"

    @property
    def served_names(self) -> list[str]:
        """Names that clients ask for the model by: those that are set, or the model's own."""
        own = self.name if self.is_folder else self.model
        named = self.settings.get("served-model-name") or own
        return [str(name) for name in named] if isinstance(named, list) else [str(named)]

    def annotations(self) -> dict[str, str]:
        """Return the provenance as annotations under a prefix of our own."""
        return {FACT_PREFIX + name: text for name, text in self.facts.items()}

    def lines(
        self, command: str, notes: Iterable[str] = (), *, but: Iterable[str] = ()
    ) -> list[str]:
        """Return the comments of a file: the command that takes it, evidence, what is left out.

        Secrets are named there, because such a file is shared and kept in repositories: all but
        those of which the notes say it, as they do of a required api-key.
        """
        secrets = [key for key in self.settings if key not in self.shared]
        named = dict.fromkeys([*secrets, *map(hyphenated, self.lost)])
        named_already = {*but, *([API_KEY] if self.requires_api_key else [])}
        kept_back = [_kept_back(key) for key in named if key not in named_already]
        return [command, *self.comments, *dropped(self.values), *notes, *kept_back]

    def whole_lines(self, file: str) -> list[str]:
        """Return the comments of a file of vLLM's, which holds the secrets that were kept."""
        command = f"vllm serve --config {file}"
        return [command, *self.comments, *map(_kept_back, self.lost)]

    def with_model(self, model: str) -> Recommendation:
        """Return the same for another name of the model: the one it has where it is served."""
        return replace(self, values={**self.values, "model": model})


def dropped(values: Mapping[str, object]) -> list[str]:
    """Return a sentence for each key that would cap the tuned limits from below.

    >>> dropped({"max_num_active_seqs": 4})
    ['left out max-num-active-seqs: 4, which would cap the tuned limits']
    """
    spelled = {hyphenated(key): value for key, value in values.items()}
    return [
        f"left out {key}: {spelled[key]}, {CAPPED}" for key in LIVE_LIMIT_KEYS if key in spelled
    ]


def without_lost(values: Mapping[str, object]) -> tuple[dict[str, object], tuple[str, ...]]:
    """Return the values of a run directory and the keys whose secret it does not hold.

    >>> without_lost({"model": "m", "api-key": "<redacted>"})
    ({'model': 'm'}, ('api-key',))
    """
    lost = tuple(key for key, value in values.items() if REDACTED in json.dumps(value))
    return {key: value for key, value in values.items() if key not in lost}, lost


def kept_back_in(comments: Iterable[str]) -> tuple[str, ...]:
    """Return the keys whose secret is not in a file, by the remarks it has on them.

    >>> kept_back_in(["tuned", "left out api-key, which is a secret: set VLLM_API_KEY"])
    ('api-key',)
    """
    matches = map(_KEPT_BACK.fullmatch, comments)
    return tuple(match["key"] for match in matches if match)


def _kept_back(key: str) -> str:
    name = _ENV_NAMES.get(hyphenated(key))
    how = f"set {name} in the environment" if name else "add it where the file is used"
    return f"left out {key}, which is a secret: {how}"


_IN_COMMENTS: Final = {
    "tuned-at": re.compile(r"tuned (\d{4}-\d\d-\d\d) on "),
    "trace": re.compile(r"tuned \S+ on [\d,]+ requests of (.+) \(sha256 "),
    "trace-sha256": re.compile(r"\(sha256 ([0-9a-f]+)…\)"),
    "vllm-version": re.compile(r"^vLLM (\d[\w.+]*), "),
    "device": re.compile(
        r"^vLLM \d[\w.+]*, (.+?), (?=PREDICTED|predicted|measured live|\d+ settings)"
    ),
    "run-id": re.compile(r"^evidence: (?:.*/)?([^/]+)/?$"),
}
"""Where the comments of an emitted file say what annotations say.

Source: `comments` of tuner.emit.comments.
"""


_BESIDE: Final = re.compile(
    r"  \S+ .* -> |against the current |KEEP WHAT YOU HAVE|P\(better\)|limited by: |caveat: "
)
"""How other comments of an emitted file begin that tell of a run.

Source: `comments` of tuner.emit.comments.
"""


def facts_of_run(result: RunResult, advice: Advice, folder: Path) -> dict[str, str]:
    """Return the provenance of a run by name; what nobody knows is left out."""
    made, engine = result.provenance, result.provenance.engine
    is_foretold = advice.is_predicted and result.method != "calibrated"
    facts = {
        "run-id": folder.resolve().name,
        "tuned-at": made.made_at,
        "method": "shadow" if is_foretold else result.method,
        "trace": made.trace.source,
        "trace-sha256": made.trace.sha256,
        "vllm-version": engine and engine.vllm_version,
        "device": engine and engine.device,
        "limits": spelled(result.deployed),
        "knobs": settings_text(result.knobs.deployed) if result.knobs else "",
        "against": spelled(result.current),
        "gain": _gain(result, advice),
        "tuner-version": made.tuner_version,
    }
    return {name: str(fact) for name, fact in facts.items() if fact}


def spelled(limits: EngineLimits) -> str:
    """Return both limits with their names.

    >>> spelled(EngineLimits(8, 2048))
    '8/2048 (max_num_seqs/max_num_batched_tokens)'
    """
    return f"{limits} (max_num_seqs/max_num_batched_tokens)"


def _gain(result: RunResult, advice: Advice) -> str:
    """Return the gain of what is recommended, with its interval, in one line."""
    if result.turned is not None:
        return result.turned.together
    if not advice.is_change:
        return f"none: keep what you have, {advice.why}"
    if not result.evidence:
        return "not compared with the current values"
    row = result.decisive_row
    if row is None and advice.gain_text:
        return advice.gain_text
    return _gain_of((row or result.evidence[0]).text)


def _gain_of(row: str) -> str:
    """Return metric and change of a row, as in "e2e_p99 -28 %, interval -31 % … -25 %"."""
    metric, _, rest = row.strip().partition(" ")
    return f"{metric} {rest.partition('(')[2].removesuffix(')')}"


def first_comments(path: Path) -> list[str]:
    """Return the comments above a file's values, without the command that takes the file."""
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    lines = list(dropwhile(lambda line: line.strip() in {"", "---"}, lines))
    above = takewhile(lambda line: line.startswith("#"), lines)
    notes = [line.removeprefix("#").removeprefix(" ") for line in above]
    return notes[1:] if notes and notes[0].startswith("vllm serve ") else notes


def with_evidence(text: str, comments: Sequence[str]) -> str:
    r"""Return a YAML file with the evidence above its values replaced by that of the comments.

    Other comments stay, and a file that has no evidence there gets none.

    >>> old = "# mine\n# tuned 2026-01-02 on 9 requests\n# evidence: runs/a\nmodel: m\n"
    >>> with_evidence(old, ["tuned 2026-03-04 on 7 requests", "evidence: runs/b"])
    '# mine\n# tuned 2026-03-04 on 7 requests\n# evidence: runs/b\nmodel: m\n'
    """
    lines = text.split("\n")
    above = takewhile(lambda line: line.strip() in {"", "---"} or line[0] == "#", lines)
    start, end = _evidence_in([line.removeprefix("#").removeprefix(" ") for line in above])
    if start == end:
        return text
    first, last = _evidence_in(comments)
    break_ = "\r" if lines[start].endswith("\r") else ""
    new = [line + break_ for line in commented(comments[first:last]).split("\n")[:-1]]
    return "\n".join([*lines[:start], *new, *lines[end:]])


def _evidence_in(comments: Sequence[str]) -> tuple[int, int]:
    """Return from where to where the comments say what was tuned; twice the same if nowhere."""
    told = [
        i
        for i, line in enumerate(comments)
        if _BESIDE.match(line) or any(p.search(line) for p in _IN_COMMENTS.values())
    ]
    if not told:
        return 0, 0
    ends = [i for i in told if _IN_COMMENTS["run-id"].search(comments[i])]
    return told[0], (ends[0] if ends else told[-1]) + 1


def facts_in(comments: Sequence[str], tuned: EngineLimits) -> dict[str, str]:
    """Return what the comments of an emitted file say, by name; nothing if they are others'."""
    facts: dict[str, str] = {}
    for name, pattern in _IN_COMMENTS.items():
        matches = [match[1] for line in comments if (match := pattern.search(line))]
        facts |= {name: matches[0]} if matches else {}
    if not facts:
        return {}
    if any("PREDICTED" in line for line in comments):
        facts["method"] = "shadow"
    keeps = [line for line in comments if line.startswith("KEEP WHAT YOU HAVE")]
    gains = [_gain_of(line) for line in comments if line.startswith(" ") and " -> " in line]
    decided = [line for line in comments if line.startswith(DECIDED_BY)]
    knobs = [line for line in comments if line.startswith("knobs together: ")]
    if knobs and any(line.startswith(SET_BESIDE) for line in comments):
        facts["gain"] = knobs[0]
    elif keeps:
        facts["gain"] = f"none: keep what you have, {keeps[0].rpartition('; ')[2]}"
    elif gains:
        facts["gain"] = decided[0].removeprefix(DECIDED_BY) if decided else gains[0]
    return {**facts, "limits": spelled(tuned)}
