"""Engine `vllm`: vLLM in this process; its core, with the weights, is a process of its own."""
