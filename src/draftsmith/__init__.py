"""Train DFlash drafters for your own language model, and measure what they are worth by decoding."""

__version__ = "0.1.0"
