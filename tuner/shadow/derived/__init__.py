"""A profile of a GPU that is not at hand, from published measurements of its operations.

`derive` makes it, for what is `wanted`: a model (`models`) on one of the `gpus`, served with a
configuration. `tables` asks the library that holds the measurements.
"""
