"""The engine on one machine: own sampler, scorer and learner over any Hugging Face decoder-only model."""
