"""Speculation that guesses whatever the costs, right and wrong as a seed says."""

import random

from jaxserve.speculative.speculation import Speculation


class Reckless(Speculation):
    """guess(tokens, count) says what may follow; about one guess in `wrong_in` is then spoilt."""

    def __init__(self, guess, *, vocab, seed=0, most=7, wrong_in=4, read_in=2):
        self._guess, self._vocab, self._most = guess, vocab, most
        self._wrong_in, self._read_in = wrong_in, read_in
        self._random = random.Random(seed)
        self.num_chosen = 0
        self.seconds = []

    def may_pay(self, num_rows):
        return True

    def worth_reading(self, candidates, num_rows):
        return self._random.randrange(self._read_in) == 0

    def choose(self, candidates, num_rows):
        chosen, room = {}, self._most
        for candidate in candidates:
            count = min(candidate.room, room, self._random.randrange(self._most + 1))
            guesses = list(self._guess(list(candidate.tokens), count))[:count]
            for place in range(len(guesses)):
                if self._random.randrange(self._wrong_in) == 0:
                    guesses[place] = self._random.randrange(self._vocab)
            chosen[candidate.key] = guesses
            room -= len(guesses)
        self.num_chosen += sum(map(len, chosen.values()))
        return chosen

    def learn(self, key, length, found):
        pass

    def count_step(self, size, read_first, seconds):
        self.seconds.append((size, read_first, seconds))

    def forget(self, key):
        pass
