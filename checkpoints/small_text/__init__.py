"""The text of the small checkpoint: `written.txt` by hand, `generated.txt` from `grammar.txt`.

Knows text files, not models. All of it was written for this project (Apache-2.0).
"""
