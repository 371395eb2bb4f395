"""attnrl: process-supervised RL for reasoning models, after "Attention as a Compass" (AttnRL)."""

__version__ = "0.1.0"
