"""Pure decisions: what better means, what to measure next, which configuration has won.

`budget` divides the time of a run, `space` holds what may be tried, `objective` turns a
measurement into a score, `ladder` proposes the next configuration and names the finalists,
`race` decides between them; `trials` is how all of these keep and read what was measured.
"""
