"""What the recommendation is written as: one module for each deployment target.

`sources` reads a recommendation, `recommendation` holds it with its evidence, `registry` finds
the target by its name; `flags`, `container`, `edits`, `merge`, `json_patch` and `yaml_text` are
what targets share.
"""
