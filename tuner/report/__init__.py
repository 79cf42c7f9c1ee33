"""A run as one page: a self-contained HTML file that says and shows the result.

`run_files` reads the run, `points` and `words` prepare its numbers, one module each makes a
section out of `parts`, `page` puts the sections into one file.
"""
