"""Command lines and YAML files to dataclass configs, strictly, without importing torch."""
