"""Steps 2 and 8 of the walk: text to token ids, and token ids back to text.

`load.load_tokenizer` makes a `protocol.Tokenizer` from the files that came with the weights;
`detokenizer.IncrementalDetokenizer` turns an answer's ids into text as they arrive and finds
stop strings. Nothing here knows jax, the engine, or HTTP.
"""
