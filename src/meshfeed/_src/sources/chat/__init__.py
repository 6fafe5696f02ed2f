"""Chats as tokens: the tokenizer, its chat template, and the mask of what a model must learn to write."""
