"""The bundled picture model: a small LLaVA, its pictures, and what trains and evaluates it."""
