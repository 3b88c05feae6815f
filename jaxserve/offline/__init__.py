"""Work without a server: files of requests against an engine in this process (all of the walk).

`batch_input` reads lines, `batch_output` writes answers and knows after a crash what is done,
`batch_run` keeps the engine busy in between. What a request's body means is given from outside.
"""
