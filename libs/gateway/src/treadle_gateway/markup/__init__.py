"""Between messages and tokens: a model's own template, tokenizer and way of writing calls."""
