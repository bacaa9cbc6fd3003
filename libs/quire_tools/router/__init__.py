"""`quire router`: an OpenAI-compatible reverse proxy that sends each request to the engine which answers it first.

A request's way through the modules:

1. `server` receives it, and `requests` reads what routing needs of it: model, prompt, hints.
2. `prompts` turns the prompt into tokens, by the engines' own tokenizer.
3. `choice` orders the engines by the time to first token that Quire's `Assign` expects of them, from what `block_names`
   says Quire has, what each engine has itself (`known_blocks`, by its KV events), and its queue (`engine`).
4. `forwarding` sends it to the first of them, and to the next one if that fails before its first token; with prefill
   engines of their own, `disaggregation` has one of these compute the prompt at the same time.

`health` finds out which engines answer. Without Quire requests are routed by queues and KV events alone.
"""
