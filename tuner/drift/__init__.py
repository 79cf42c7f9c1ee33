"""Whether traffic has moved, whether a re-tune would pay, and keeping it tuned.

`baseline` reads what a configuration was tuned for, `compare` finds shifts beyond chance,
`retune` replays the new traffic on shadows, `check` says what a change would gain and joins
all to a verdict, `by_hour` does so for the hours of a day; `watch` acts on verdicts.
"""
