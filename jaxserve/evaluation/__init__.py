"""How good a model is: perplexity, held-out tasks, and how far apart two models are."""
