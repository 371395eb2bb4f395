"""Presets: sparse TOML files, listed by `attnrl presets`."""
