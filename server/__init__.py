"""Steps 1 to 3 and 9 of the walk over HTTP: the Flask application and what starts it.

`app.create_app` makes the application from its parts, `worker` builds it in a gunicorn worker,
`launch.serve` starts the engine process and the workers. Nothing here knows jax or the engine's
insides; the line to the engine is `jaxserve.client`.
"""
