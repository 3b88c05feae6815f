"""OpenAI's files and batches: work that is handed in as a file and fetched when it is done.

`files` keeps files, `batches` their batches, `validate` looks a file over before it is begun,
`line` sends one line through the application like any request, `worker` keeps doing so until all
are answered, and goes on after a restart; `file_routes` and `batch_routes` are the way in and out.
"""
