"""How the models are run: paged caches, drafting, the decode cycle and the engine around it."""
