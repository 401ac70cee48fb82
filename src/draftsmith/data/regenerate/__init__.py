"""Answers by the target itself: the same conversations and prompts, with every assistant turn written anew."""
