"""What `behaviours.py` tries: a module for each group, each with its CHECKS.

A check is a function of one `Server`. It returns one line on what it saw, or raises `FailedError`, or
`RefusedByNameError` where the server says by name that it does not do this, or `UntriedError`.
"""
