"""The bundled model: a small Llama, its corpus, and the scripts that train and evaluate it."""
