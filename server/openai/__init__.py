"""Steps 1 and 9 as OpenAI's API has them: request bodies in, answer bodies and chunks out.

`schema` says what a body may hold, `fields` what is refused, `sampling` turns it into
`SamplingParams`, `response` writes what goes back; one module per route joins them.
"""
