"""Engine `transformers`: a Hugging Face causal language model, decoded in this process."""
