"""Speculation: guessing an answer's next tokens so that one step can confirm several (step 4 to 7).

`proposer.py` says what a guesser is, `ngram.py` is one, `acceptance.py` and `costs.py` measure what
guesses are worth and what they cost, `speculation.py` decides. Knows token ids and step sizes;
must know neither sequences, pages nor devices. Imports no jax.
"""
