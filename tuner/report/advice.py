"""What a run says beside its limits: of variants of the engine, and to its clients."""

from __future__ import annotations

from tuner.report.parts import Cell, Section, Table, number
from tuner.report.run_files import RunFiles
from tuner.report.words import NOTHING, percent, seconds, sentence
from tuner.run.knobs.records import settings_text
from tuner.run.loads.surface import LATENCIES
from tuner.run.variants.records import VariantFinding
from tuner.search.objective import moved, named
from tuner.stats import short

_HEADS = ("variant", "keys", "limits", "gain", "P(better)")


def variants(run: RunFiles) -> Section | None:
    """Return how variants of the engine compare, None where there are none."""
    found = run.result.variants
    if found is None:
        return None
    rows = (found.as_it_is, *found.others)
    statistics = list(dict.fromkeys(("p50", run.result.tail)))
    keys = [f"{latency}_{statistic}" for latency in LATENCIES for statistic in statistics]
    has_price = any(one.cost_per_1000 is not None for one in rows)
    heads = [*_HEADS, *(key.replace("_", " ") for key in keys), "requests/s", "GPUs", "per GPU"]
    heads += ["cost of 1,000"] if has_price else []
    table = Table(
        "variants-all",
        "Each at its own best limits and the same SLOs; requests/s is the most that hold.",
        tuple(heads),
        tuple(_row(one, keys, has_price=has_price) for one in rows),
    )
    says = [sentence(line) for line in found.lines]
    says.append(sentence("each has a run of its own below this one, with a page like this"))
    return Section("variants", "Variants of the engine", tuple(says), tables=(table,))


def _row(one: VariantFinding, keys: list[str], *, has_price: bool) -> tuple[Cell, ...]:
    limits = one.verdict or str(one.limits)
    gain = one.gain_ratio
    gain_words = (
        NOTHING if gain is None else f"{named(one.metric)} {moved(one.metric, gain):+.1%}"
    )
    cells = [
        Cell(one.name),
        Cell(settings_text(one.settings) if one.settings else NOTHING),
        Cell(limits, mark="failed" if one.limits is None else ""),
        Cell(gain_words),
        number(one.p_better, "{:.2f}".format),
        *(number(one.latencies_s.get(key), seconds) for key in keys),
        number(one.capacity_per_s, short),
        number(one.gpus, str),
        number(one.capacity_per_gpu, short),
    ]
    if has_price:
        cells.append(number(one.cost_per_1000, short))
    return tuple(cells)


def clients(run: RunFiles) -> Section | None:
    """Return what clients should hold to, None where nothing was predicted."""
    advice = run.result.clients
    if advice is None:
        return None
    head, *lines = advice.lines()
    found = run.result.recommendation
    # Knobs that are deployed too are not in the advice: it is of the limits alone.
    of = "what comes nearest to the SLOs" if found is None else str(found.limits)
    says = [sentence(f"{head.removesuffix(':')} of {of}")]
    if advice.too_long:
        says.append(
            sentence(
                f"no setting helps the {percent(advice.too_long)} of the requests that break "
                "an SLO by length alone: make their prompts or answers shorter, or give them "
                "SLOs of their own"
            )
        )
    bullets = tuple(line.strip() for line in lines)
    return Section("clients", "What clients should hold to", tuple(says), bullets)
