"""Pure decisions: what better means, what to measure next, which configuration has won.

`budget` divides the time of a run, `space` holds what may be tried, `objective` turns a
measurement into a score, `ladder` proposes the next configuration and names the finalists.
`choice` decides between them by `draws`, which `replayed` makes of live replays alone;
`effects` is what replays say of settings, `race` who replays when and what a decision is, and
`trials` how all of these keep and read what was measured.
"""
