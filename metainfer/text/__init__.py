"""Text and tokens: tokenizers, chat templates, streaming detokenisation, stop strings. No torch."""
