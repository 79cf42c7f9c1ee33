"""One page, a self-contained HTML file: of a run, or of what a profile predicts.

`run_files` reads the run, `points` and `words` prepare its numbers, one module each makes a
section out of `parts`, `page` puts the sections into one file. `explore` and `load_curve` make
those of a surface of predictions.
"""
