"""What the page of `tune explore` is made of, with dangerous names."""

from __future__ import annotations

from support.surface_parts import LOADS, PREDICTOR, SLO, TRACE, a_surface
from tuner.report.explore import Explored


def explored(loads: tuple[float, ...] = LOADS, slos: tuple[str, ...] = (SLO,)) -> Explored:
    """Return what is predicted of the traffic at the loads, and from what."""
    name = "<script>alert('profile')</script>.yaml"
    surface = a_surface(loads, slos)
    return Explored(surface, PREDICTOR.profile, name, TRACE, "balanced", 1.5)
