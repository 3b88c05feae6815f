"""Step 3 of the walk: a checked API request becomes `GenerationRequest`s for one engine.

`requests.make_generation_requests` spreads prompts and choices out, `limits` refuses what can
never fit, `seeds` gives every choice its own random numbers, `engines.choose_engine` picks who
answers. Nothing here knows jax, HTTP, or the engine's insides.
"""
