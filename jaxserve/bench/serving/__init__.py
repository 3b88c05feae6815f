"""Load on a running OpenAI-compatible server, any engine's, seen from outside (around steps 1 and 9).

A client: imports neither jax nor the engine, so that measuring takes little from what it measures.

    conversations.py  what is asked         arrivals.py  when
    http_stream.py    the connection        answers.py   one answer, read and timed
    load.py           all of them at once   metrics.py   what it comes to; report.py, plot.py
"""
