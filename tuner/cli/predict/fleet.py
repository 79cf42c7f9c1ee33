"""The table of `tune plan --fleet`: what each way to run a fleet costs and keeps."""

from __future__ import annotations

from tuner.run.fleet import FleetPlan, Stretch, Way


def fleet_lines(found: FleetPlan) -> list[str]:
    """Return for people how many replicas there are, how they run, and what comes of it."""
    aim, fixed = found.aim, found.ways[0]
    slos = ", ".join(map(str, aim.slos))
    gpus = f", {aim.devices} GPUs each" if aim.devices > 1 else ""
    lines = [
        f"{fixed.replicas} replicas{gpus} at {found.limits} "
        f"(max_num_seqs/max_num_batched_tokens) behind a {aim.router} router keep {slos}; "
        f"predicted, wrong by {found.wrong_ratio:.0%} on what was measured",
        f"the current {found.current} needs {_count(found.needed[found.current], aim.most)}",
        f"if steps take {found.wrong_ratio:.0%} longer, the busiest stretch needs "
        f"{_count(found.if_slower, aim.most)}",
        "",
        f"{'':12}{'most':>6}{'GPU hours':>12}{'cost':>12}{'within SLOs':>14}  what breaks",
    ]
    lines += [_way(way) for way in found.ways]
    lines += ["", f"{'from':>8}{'requests/s':>12}" + "".join(map(_head, found.ways))]
    for each in zip(*(way.stretches for way in found.ways), strict=True):
        cells = "".join(f"{one.wanted:>8g}{one.within_ratio:>8.1%}" for one in each)
        lines.append(f"{_instant(each[0].start_s):>8}{each[0].offered_per_s:>12.3g}{cells}")
    return lines


def _count(replicas: int | None, most: int) -> str:
    return f"more than {most}" if replicas is None else f"{replicas}"


def _head(way: Way) -> str:
    return f"{way.name:>16}"


def _way(way: Way) -> str:
    cost = "-" if way.cost is None else f"{way.cost:,.2f}"
    target = "" if way.autoscaler is None else f"{way.autoscaler.target:.3g} in flight each; "
    return (
        f"{way.name:<12}{way.replicas:>6}{way.gpu_hours:>12.4g}{cost:>12}"
        f"{way.within_ratio:>14.2%}  {target}{_broken(way.breaks, len(way.stretches))}"
    )


def _broken(breaks: list[Stretch], of: int) -> str:
    if not breaks:
        return "nothing"
    names = sorted({slo.name for one in breaks for slo in one.broken or ()})
    return f"{', '.join(names)} in {len(breaks)} of {of} stretches"


def _instant(start_s: float) -> str:
    return f"{start_s / 3600:g} h" if start_s % 3600 == 0 else f"{start_s / 60:g} min"
