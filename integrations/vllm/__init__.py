"""vLLM as the generator: a Hugging Face decoder continues soft prompts with semantic IDs, many users at a time."""
