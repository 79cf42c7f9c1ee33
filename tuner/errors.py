"""What can go wrong, and what may be doubted.

Errors stop a run and carry the exit code and a hint; caveats never stop a run: they are
returned with the numbers they qualify and stand in the result for good.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar, Final

MAX_MESSAGE: Final = 1500
"""Ours: characters, far more than a sentence has."""


class TunerError(Exception):
    """Base of every error that is the user's, the trace's or the engine's; never raised itself.

    The message is one sentence of what is wrong, where, what was expected and what was got;
    `hint` is one sentence of what to do, or empty.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, hint: str = "") -> None:
        # It may quote what a stranger wrote.
        shown = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}…"
        super().__init__(shown)
        self.message = shown
        self.hint = hint

    def __reduce__(self) -> tuple[type[TunerError], tuple[str, str]]:
        """Keep the hint when the error travels between processes."""
        return (type(self), (self.message, self.hint))


class StorageError(TunerError):
    """The study of a run is out of reach or damaged; what was measured before is kept."""

    exit_code = 4


class DefectError(TunerError):
    """A defect of ours has ended a part of the work, and the rest goes on."""


class UsageError(TunerError):
    """An option, a configuration file or a combination of them cannot be used."""

    exit_code = 2


class RefusedConfigError(UsageError):
    """vLLM refuses a configuration; its log may say more than the message."""


class TraceError(TunerError):
    """A trace file or a line of it is wrong."""

    exit_code = 2


class TooFewSamplesError(TunerError):
    """The sample cannot carry the requested statistic."""

    exit_code = 2


class NoFeasibleConfigError(TunerError):
    """The search is done and nothing meets the SLOs."""

    exit_code = 3


class EngineError(TunerError):
    """The engine did not start, ran out of memory or died."""

    exit_code = 4


class ShadowError(TunerError):
    """The shadow cannot stand in for this engine, or a profile does not fit it."""

    exit_code = 2


class ReplayError(TunerError):
    """The replay itself is void: its clock or its send lag was off."""

    exit_code = 4


class Caveat(StrEnum):
    """A reason to doubt a number; it stands in the result with the number."""

    NOT_SUSTAINED = "not_sustained"
    NOISY_MACHINE = "noisy_machine"
    CLOSED_LOOP = "closed_loop"
    FEW_SAMPLES = "few_samples"
    PREEMPTED = "preempted"
    AT_SPACE_EDGE = "at_space_edge"
    WITHIN_NOISE = "within_noise"
    UNIFORM_TRACE = "uniform_trace"
    QUANTISED_CLOCK = "quantised_clock"
    LOW_DEMAND = "low_demand"
    ALL_FINISHED = "all_finished"
    LOAD_MISSED = "load_missed"
    SAMPLED_TRACE = "sampled_trace"
    REQUESTS_REFUSED = "requests_refused"
    REQUESTS_CLIPPED = "requests_clipped"
    REQUESTS_LOST = "requests_lost"
    CUT_SHORT = "cut_short"
    RESTARTED_PER_CONFIG = "restarted_per_config"
    CEILING_LOWERED = "ceiling_lowered"
    GRAPHS_OF_CEILING = "graphs_of_ceiling"
    GPU_SHARED = "gpu_shared"
    GPU_SLOWED = "gpu_slowed"
    HOST_BOUND = "host_bound"
    FULL_CLOCKS = "full_clocks"
    DEMO_MODEL = "demo_model"
    NOT_CONFIRMED_COLD = "not_confirmed_cold"
    BUDGET_SPENT = "budget_spent"
    WINDOWED = "windowed"
    SHORT_WINDOW = "short_window"
    SHADOW_ONLY = "shadow_only"
    EXTRAPOLATED = "extrapolated"
    LESS_HEADROOM = "less_headroom"
    DERIVED = "derived"
    NOT_RACED = "not_raced"
    SHADOW_UNFIT = "shadow_unfit"
    SHADOW_DISAGREES = "shadow_disagrees"
    PROFILE_FORCED = "profile_forced"
    COLD_DIFFERS = "cold_differs"
    RECORDING_ENDED = "recording_ended"
    REQUESTS_RAN_OUT = "requests_ran_out"
    ANSWERS_CUT = "answers_cut"
    EXPERTS_ON_RANDOM_TEXT = "experts_on_random_text"
    STEPS_STRETCHED = "steps_stretched"
    DRAFTS_ON_RANDOM_TEXT = "drafts_on_random_text"
    ACCEPTANCE_GIVEN = "acceptance_given"
    SHORT_ANSWERS = "short_answers"
    ADAPTERS_LEFT_OUT = "adapters_left_out"
    MEDIA_LEFT_OUT = "media_left_out"
    KV_KEPT_ELSEWHERE = "kv_kept_elsewhere"
    RANDOM_WEIGHTS = "random_weights"

    @property
    def text(self) -> str:
        """What a reader of the result should know, in one sentence."""
        return _CAVEAT_TEXTS[self]


_CAVEAT_TEXTS: dict[Caveat, str] = {
    Caveat.NOT_SUSTAINED: "the engine did not keep up with the load",
    Caveat.NOISY_MACHINE: "the machine disturbed many steps: trust the intervals less",
    Caveat.CLOSED_LOOP: "closed loop: never compare these latencies with an open-loop replay",
    Caveat.FEW_SAMPLES: "the window is too small for a p99: fewer than ten requests exceed it",
    Caveat.PREEMPTED: "requests were preempted because the KV cache ran out of blocks",
    Caveat.AT_SPACE_EDGE: "the best value lies at the edge of what was searched: larger "
    "caps in --max-num-seqs go beyond it",
    Caveat.WITHIN_NOISE: "the gain is within noise",
    Caveat.UNIFORM_TRACE: "lengths are nearly all equal; uniform data misleads",
    Caveat.QUANTISED_CLOCK: "the trace's clock is quantised; its bursts may be false",
    Caveat.LOW_DEMAND: (
        "an engine that keeps up with the trace does not fill the larger caps; a slower or "
        "overloaded one may"
    ),
    Caveat.ALL_FINISHED: (
        "the current configuration finishes all that comes, so that requests per second tell "
        "at most how soon the last of them end: a higher --load, or --load-model closed and "
        "--concurrency, asks who can finish most"
    ),
    Caveat.LOAD_MISSED: (
        "whole sessions, or requests in flight, come more than a tenth off the load that was "
        "asked for: what they come to stands in the trace's description"
    ),
    Caveat.SAMPLED_TRACE: "the trace was sampled from aggregates, not recorded",
    Caveat.REQUESTS_REFUSED: "requests longer than the engine's max_model_len were refused",
    Caveat.REQUESTS_CLIPPED: "requests longer than the engine's max_model_len were clipped",
    Caveat.REQUESTS_LOST: (
        "requests timed out or were aborted; they count as longer than any latency"
    ),
    Caveat.CUT_SHORT: "the replay was cut short because it could no longer win",
    Caveat.RESTARTED_PER_CONFIG: (
        "this engine cannot change its limits: it was restarted per configuration"
    ),
    Caveat.CEILING_LOWERED: (
        "the engine did not start at the largest settings, so that they were left out"
    ),
    Caveat.GRAPHS_OF_CEILING: (
        "small caps were measured with CUDA graphs that they will not have when deployed alone"
    ),
    Caveat.GPU_SHARED: "other processes held memory of the GPU while it was measured",
    Caveat.HOST_BOUND: (
        "in more than a tenth of the time launching a batch took the host longer than the "
        "device took to compute one: these step times go with the CPU and what else runs on "
        "it; batches that a CUDA graph serves take it least"
    ),
    Caveat.GPU_SLOWED: "the GPU was slowed down by heat or its supply while it was measured",
    Caveat.FULL_CLOCKS: (
        "idle time was skipped, so that the GPU ran at the clocks of full load: traffic that "
        "leaves it idle now and then may see other step times"
    ),
    Caveat.STEPS_STRETCHED: (
        "the machine stretched many steps: predictions spread that over all of them, so that "
        "measured tails may be longer"
    ),
    Caveat.DEMO_MODEL: "the bundled demo model with random weights was measured, not yours",
    Caveat.NOT_CONFIRMED_COLD: "not confirmed on an engine started with these values",
    Caveat.BUDGET_SPENT: "the time budget ended the search",
    Caveat.WINDOWED: "a window of the trace was replayed, not all of it",
    Caveat.SHORT_WINDOW: (
        "the window that raced lasts less than three times as long as its middle request: the "
        "race shows mostly how it begins and how it drains"
    ),
    Caveat.SHADOW_ONLY: "predicted from a profile, not measured: no engine was started",
    Caveat.LESS_HEADROOM: "the answer bears less load than the current configuration",
    Caveat.EXTRAPOLATED: (
        "predicted beyond what was measured: more than a tenth of the time goes to batches "
        "fuller than those that the profile was learnt from, whose times extend the last slope"
    ),
    Caveat.DERIVED: (
        "the profile was derived from published tables, which know the contexts of a batch by "
        "their sum alone, and not measured"
    ),
    Caveat.NOT_RACED: "predicted, not raced against the current configuration",
    Caveat.SHADOW_UNFIT: "the shadow's error was too large to rank by; the search was live",
    Caveat.SHADOW_DISAGREES: (
        "live replays differed from the shadow at the same speed beyond its stated error: the "
        "answer weighs both, and what did not race is less sure"
    ),
    Caveat.PROFILE_FORCED: (
        "the profile may be of another machine or engine, which --force-profile allows"
    ),
    Caveat.ANSWERS_CUT: (
        "more than 1 % of the recorded answers were cut short as clients left; their whole "
        "lengths are unknown"
    ),
    Caveat.RECORDING_ENDED: (
        "closed loop: the recording ended before many requests were answered; rates and "
        "latencies are of the time until then"
    ),
    Caveat.REQUESTS_RAN_OUT: (
        "closed loop: the requests ran out before the recording ended, as the engine is faster "
        "than their number allows for; rates and latencies are of the time until then"
    ),
    Caveat.EXPERTS_ON_RANDOM_TEXT: (
        "a mixture-of-experts model was replayed on random text, which is routed to other "
        "experts than yours: step times may be off in either direction"
    ),
    Caveat.DRAFTS_ON_RANDOM_TEXT: (
        "speculative decoding was replayed on random text, of which drafts are accepted at "
        "another rate than of yours: give yours (rejection_sample_method synthetic, or tune "
        "calibrate --prometheus), or do not go by these numbers"
    ),
    Caveat.ACCEPTANCE_GIVEN: (
        "drafts were accepted at the rate that was given (rejection_sample_method synthetic), "
        "whatever they were: what is emitted verifies them, and is as fast only where as many "
        "of yours are accepted"
    ),
    Caveat.SHORT_ANSWERS: (
        "answers are short: one that ends by a stop token has an asynchronous engine decode it "
        "once more, in vain; replays end by length, and leave that out"
    ),
    Caveat.ADAPTERS_LEFT_OUT: (
        "the configuration serves LoRA adapters, and all requests were replayed without one: "
        "steps with adapters take longer, and max-loras makes requests wait"
    ),
    Caveat.MEDIA_LEFT_OUT: (
        "the model takes images, audio or video, and text alone was replayed: where your "
        "requests hold any, what it takes to encode them is left out"
    ),
    Caveat.KV_KEPT_ELSEWHERE: (
        "a KV connector keeps blocks beyond the engine: a replay finds there what those before "
        "it left, and nothing of what other engines bring; do not go by these numbers"
    ),
    Caveat.RANDOM_WEIGHTS: (
        "random weights were replayed (load-format dummy), and what is emitted asks for them "
        "too: take load-format out before it serves"
    ),
    Caveat.COLD_DIFFERS: "engines started cold showed another gain than the race did",
}

OF_THE_ENGINE: Final = (
    Caveat.FULL_CLOCKS,
    Caveat.EXPERTS_ON_RANDOM_TEXT,
    Caveat.DRAFTS_ON_RANDOM_TEXT,
    Caveat.ACCEPTANCE_GIVEN,
    Caveat.ADAPTERS_LEFT_OUT,
    Caveat.MEDIA_LEFT_OUT,
    Caveat.RANDOM_WEIGHTS,
)
"""What is as doubtful of predictions as it is of the replays that they were learnt from."""
