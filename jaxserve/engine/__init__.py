"""The engine: schedules, takes memory, runs steps, emits tokens (steps 4 to 7).

Host state is plain mutable Python owned by one thread; device state is immutable pytrees that go
into a step and come back from it. The scheduler touches no array, the runner knows no policy.
"""
